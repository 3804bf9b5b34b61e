"""The on-disk cache for model configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.models import config_cache
from lorax_server.models.config_cache import read_config
from tests.parity.variants import VARIANTS


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAX_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept/configs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    VARIANTS["llama-gqa"].config().save_pretrained(tmp_path)
    return tmp_path


def never(_: Path) -> Any:
    raise AssertionError("transformers was asked")


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_config_has_all_transformers_fields(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    VARIANTS[name].config().save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    first = read_config(tmp_path)
    monkeypatch.setattr(config_cache, "_read_with_transformers", never)
    assert vars(read_config(tmp_path)) == vars(first)
    fields = {name for name in vars(expected) if not name.startswith("_")} | set(expected.attribute_map)
    # JSON keys are strings. transformers adds the last field during validation.
    for field in fields - {"dtype", "quantize", "transformers_version", "id2label", "ignore_keys_at_rope_validation"}:
        value = getattr(expected, field)
        if isinstance(value, PretrainedConfig):
            value = json.loads(value.to_json_string(use_diff=False))
            del value["transformers_version"]
        assert getattr(first, field) == (list(value) if isinstance(value, tuple) else value), field
    assert getattr(first, "_remove_final_layer_norm", False) == getattr(expected, "_remove_final_layer_norm", False)
    assert str(first.dtype).removeprefix("torch.") == str(expected.dtype).removeprefix("torch.")


def test_changed_config_or_version_invalidates_cache(
    folder: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_config(folder)
    (kept,) = own_folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])  # truncated
    assert read_config(folder).hidden_size == VARIANTS["llama-gqa"].config().hidden_size
    monkeypatch.setattr(config_cache, "version", lambda _: "another")
    read_config(folder)
    text = (folder / MODEL_CONFIG_FILE).read_text()
    (folder / MODEL_CONFIG_FILE).write_text(text.replace('"rms_norm_eps"', '"initializer_range": 0.5, "rms_norm_eps"'))
    assert read_config(folder).initializer_range == pytest.approx(0.5)
    assert len(list(own_folder.iterdir())) == 3


def test_invalid_config_is_not_cached(folder: Path, own_folder: Path) -> None:
    (folder / MODEL_CONFIG_FILE).write_text('{"model_type": "unknown"}')
    with pytest.raises(ValueError, match="unknown"):
        read_config(folder)
    assert not own_folder.exists()
