"""The tokenizers that adapters bring, for a script: read in the thread that needs one."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from lorax_server.adapters.sources.finder import Recent
from lorax_server.errors import AdapterError, ConfigError
from lorax_server.files.plain_file import Stamp
from lorax_server.files.tokenizer_folder import TokenizerFolder
from lorax_server.text.conversion import Converter
from lorax_server.text.tokenizer import TextTokenizer, load_own_tokenizer, share_base_tokenizer
from lorax_server.types import Resolved

_Key = tuple[Path, tuple[str, ...], tuple[Stamp, ...]]  # a folder, its files and their stamps
MAX_TOKENIZERS = 64  # each of which may take tens of megabytes
MAX_FAILURES = 1024
FAILURE_S = 10.0  # a failure may be due to the machine, and pass


class AdapterTokenizers:
    """Keeps those that were used last, and remembers failures for a while. Any thread may use it."""

    def __init__(self, base: TextTokenizer, base_folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._base_folder = base_folder
        self._converter = Converter()
        self._lock = threading.Lock()
        self._clock = clock
        self._found: Recent[_Key, TextTokenizer] = Recent(MAX_TOKENIZERS)
        self._failures: Recent[_Key, tuple[float, str]] = Recent(MAX_FAILURES)  # until when, and why

    def __len__(self) -> int:
        return len(self._found)

    def find(self, adapter: Resolved) -> TextTokenizer:
        """The adapter's own, where it brings one."""
        if adapter.folder is None or not adapter.tokenizer_files:
            return self._base
        folder = Path(adapter.folder)
        # Not by the identity, which is that of the weights.
        key = folder, adapter.tokenizer_files, adapter.tokenizer_stamps
        with self._lock:
            found = self._found.recall(key)
            until, why = self._failures.recall(key) or (0.0, "")
        if found is None and self._clock() < until:
            raise AdapterError(why)
        return found or self._load(key, adapter)

    def close(self) -> None:
        """End what other processes do for it."""
        self._converter.close()

    def _load(self, key: _Key, adapter: Resolved) -> TextTokenizer:
        files = TokenizerFolder(key[0], dict(zip(adapter.tokenizer_files, adapter.tokenizer_stamps, strict=True)))
        try:
            found = self._read(files)
        except (ConfigError, OSError) as error:
            why = f"adapter {files.path.name!r}: its tokenizer cannot be used: {error}"
            with self._lock:
                self._failures[key] = self._clock() + FAILURE_S, why
            raise AdapterError(why) from error
        with self._lock:
            self._found[key] = found
        return found

    def _read(self, files: TokenizerFolder) -> TextTokenizer:
        shared = share_base_tokenizer(files, self._base, self._base_folder)
        return shared or load_own_tokenizer(files, self._base_folder, self._converter)
