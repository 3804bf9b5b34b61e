import pytest

from lorax_server.errors import ConfigError, InputError, LoraxError, UnsupportedModelError, WeightsError


@pytest.mark.parametrize(
    ("error", "status"),
    [(LoraxError, 500), (ConfigError, 500), (UnsupportedModelError, 500), (WeightsError, 500), (InputError, 422)],
)
def test_every_error_has_its_status_code(error: type[LoraxError], status: int) -> None:
    assert issubclass(error, LoraxError)
    assert error("text").status == status
    assert str(error("text")) == "text"


def test_unsupported_model_is_config_error() -> None:
    assert issubclass(UnsupportedModelError, ConfigError)
