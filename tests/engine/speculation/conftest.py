"""Fixtures for tests of speculative decoding."""

import pytest

from lorax_server.engine.speculation.drafter import SpeculativeDrafter


@pytest.fixture
def equal_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the same time for every step to the real drafter, because step times vary on a busy machine."""
    record = SpeculativeDrafter.record_step

    def record_equal_time(drafter: SpeculativeDrafter, num_sequences: int, num_drafted: int, _: float) -> None:
        record(drafter, num_sequences, num_drafted, 1.0)

    monkeypatch.setattr(SpeculativeDrafter, "record_step", record_equal_time)
