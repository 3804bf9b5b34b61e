"""The model that ships in the package. `lorax serve` serves it if no model is named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE

FOLDER = Path(__file__).parent.parent / "demo"
NAME = "lorax-demo"
EXAMPLES = FOLDER / "examples.json"
MISSING = "--model-id is missing: say which model, such as --model-id Qwen/Qwen2.5-0.5B-Instruct"
# It takes little of a laptop's memory. Its adapters are all there are: one that is misspelt is not sought elsewhere.
SETTINGS: Mapping[str, Any] = {
    "model_id": NAME,
    "device": "cpu",
    "weights_cache_override": FOLDER / "model",
    "adapters_dir": FOLDER / "adapters",
    "playground_examples": EXAMPLES,
    "tool_parser": ("json=json",),  # who writes JSON can write calls, though no template shows it functions
    "hub": False,
    "cache_bytes": 2**28,
    "adapter_bytes": 2**26,
    "adapter_host_bytes": 2**26,
}
# Sizes that replace a size above.
ALTERNATIVES = {"max_batch_total_tokens": "cache_bytes", "adapter_memory_fraction": "adapter_bytes"}
ABOUT_A_MODEL = ("revision", "source", "weights_cache_override", "tokenizer_config_path")


def add_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the demo's settings where the operator gave none."""
    if any(name in values for name in ABOUT_A_MODEL):
        raise ConfigError(MISSING)
    if not (FOLDER / "model" / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(f"{MISSING} (this installation came without the demo model)")
    replaced = {ALTERNATIVES[name] for name in values if name in ALTERNATIVES}
    return {name: value for name, value in SETTINGS.items() if name not in replaced} | dict(values)
