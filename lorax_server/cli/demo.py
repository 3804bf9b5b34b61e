"""Settings for the bundled demo model, which `lorax serve` uses without `--model-id`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
DEMO_NAME = "lorax-demo"
EXAMPLES_PATH = DEMO_FOLDER / "examples.json"
MISSING_MODEL_MESSAGE = "--model-id is missing: name a model, such as --model-id Qwen/Qwen2.5-0.5B-Instruct"
# Small memory sizes, for laptops. The hub is off, so that a misspelled adapter name is reported immediately.
DEMO_SETTINGS: Mapping[str, Any] = {
    "model_id": DEMO_NAME,
    "device": "cpu",
    "weights_cache_override": DEMO_FOLDER / "model",
    "adapters_dir": DEMO_FOLDER / "adapters",
    "playground_examples": EXAMPLES_PATH,
    "tool_parser": ("json=json",),  # the adapter `json` can write tool calls as JSON
    "describe_tools": False,  # it was not trained with tools in the prompt
    "hub": False,
    "cache_bytes": 2**28,
    "adapter_bytes": 2**26,
    "adapter_host_bytes": 2**26,
}
# Operator settings, and the demo setting that each of them replaces.
REPLACED_SETTINGS = {"max_batch_total_tokens": "cache_bytes", "adapter_memory_fraction": "adapter_bytes"}
MODEL_FLAGS = ("revision", "source", "weights_cache_override", "tokenizer_config_path")


def add_demo_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the demo settings, overridden by `values` (set by the operator)."""
    if any(name in values for name in MODEL_FLAGS):
        raise ConfigError(MISSING_MODEL_MESSAGE)
    if not (DEMO_FOLDER / "model" / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(f"{MISSING_MODEL_MESSAGE} (this installation does not include the demo model)")
    replaced = {REPLACED_SETTINGS[name] for name in values if name in REPLACED_SETTINGS}
    return {name: value for name, value in DEMO_SETTINGS.items() if name not in replaced} | dict(values)
