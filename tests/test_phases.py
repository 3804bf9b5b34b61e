import re

import pytest

from lorax_server.phases import Phases


def test_phases_keep_order_and_add_up() -> None:
    phases = Phases()
    with phases.measure("kernels"):
        pass
    once = phases.seconds["kernels"]
    with phases.measure("weights"), phases.measure("kernels"):
        pass
    assert list(phases.seconds) == ["kernels", "weights"]
    assert phases.seconds["kernels"] > once >= 0
    assert re.fullmatch(r"\d+\.\d s: kernels \d\.\d, weights \d\.\d, other \d\.\d", str(phases))


def test_failed_phase_is_measured() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="no"), phases.measure("weights"):
        raise ValueError("no")
    assert phases.seconds["weights"] > 0
