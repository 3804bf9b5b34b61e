"""The tokenizers that adapters bring, for a script: read in the thread that needs one."""

import threading
from pathlib import Path

from lorax_server.adapters.finder import Recent
from lorax_server.adapters.plain_file import Stamp
from lorax_server.converter import Converter
from lorax_server.errors import AdapterError, ConfigError
from lorax_server.model_files import TokenizerFolder
from lorax_server.tokenizer import TextTokenizer, load_own_tokenizer, share_base_tokenizer
from lorax_server.types import Resolved

_Key = tuple[Path, tuple[str, ...], tuple[Stamp, ...]]  # a folder, its files and their stamps
MAX_TOKENIZERS = 64  # each of which may take tens of megabytes


class AdapterTokenizers:
    """Keeps those that were used last. Any thread may use it."""

    def __init__(self, base: TextTokenizer, base_folder: Path) -> None:
        self._base = base
        self._base_folder = base_folder
        self._converter = Converter()
        self._lock = threading.Lock()
        self._found: Recent[_Key, TextTokenizer] = Recent(MAX_TOKENIZERS)

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
        if found is None:
            vouched = dict(zip(adapter.tokenizer_files, adapter.tokenizer_stamps, strict=True))
            found = self._load(TokenizerFolder(folder, vouched))
            with self._lock:
                self._found[key] = found
        return found

    def close(self) -> None:
        """End what other processes do for it."""
        self._converter.close()

    def _load(self, files: TokenizerFolder) -> TextTokenizer:
        """A failure is not kept: it may be due to the machine, and pass."""
        try:
            shared = share_base_tokenizer(files, self._base, self._base_folder)
            return shared or load_own_tokenizer(files, self._base_folder, self._converter)
        except (ConfigError, OSError) as error:
            raise AdapterError(f"adapter {files.path.name!r}: its tokenizer cannot be used: {error}") from error
