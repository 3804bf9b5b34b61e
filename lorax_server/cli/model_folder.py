"""The folder of a base model, as far as the command line reads it."""

from pathlib import Path

from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE


def check_folder(folder: Path) -> Path:
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(f"model {str(folder)!r}: there is no config.json in it, so it is not a model's folder")
    return folder
