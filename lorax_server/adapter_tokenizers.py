"""The tokenizers that adapters bring, for a script: read in the thread that needs one."""

import threading
from pathlib import Path

from lorax_server.adapters.finder import Recent
from lorax_server.adapters.spec import Stamp, stamp_of
from lorax_server.converter import Converter
from lorax_server.errors import AdapterError, ConfigError
from lorax_server.tokenizer import TextTokenizer, load_adapter_tokenizer
from lorax_server.types import Resolved

MAX_TOKENIZERS = 64  # each of which may take tens of megabytes


class AdapterTokenizers:
    """Keeps those that were used last, and which of them are broken. Any thread may use it."""

    def __init__(self, base: TextTokenizer, base_folder: Path) -> None:
        self._base = base
        self._base_folder = base_folder
        self._converter = Converter()
        self._lock = threading.Lock()
        self._found: Recent[tuple[Path, tuple[Stamp, ...]], TextTokenizer | ConfigError] = Recent(MAX_TOKENIZERS)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, adapter: Resolved) -> TextTokenizer:
        """The adapter's own, where it brings one."""
        if adapter.folder is None or not adapter.tokenizer_files:
            return self._base
        folder = Path(adapter.folder)
        try:
            # Not by the identity, which is that of the weights.
            key = folder, tuple(stamp_of(folder / file) for file in adapter.tokenizer_files)
            with self._lock:
                found = self._found.recall(key)
            found = found or self._load(folder)
        except OSError as error:
            found = ConfigError(str(error))
        else:
            with self._lock:
                self._found[key] = found
        if isinstance(found, ConfigError):
            raise AdapterError(f"adapter {folder.name!r}: its tokenizer cannot be used: {found}") from found
        return found

    def close(self) -> None:
        """End what other processes do for it."""
        self._converter.close()

    def _load(self, folder: Path) -> TextTokenizer | ConfigError:
        try:
            return load_adapter_tokenizer(folder, self._base, self._base_folder, self._converter)
        except ConfigError as error:
            return error
