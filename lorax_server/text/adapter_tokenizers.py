"""Load and cache the tokenizers that adapters include. Used by the server and by `LLM`."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachetools import LRUCache, TTLCache

from lorax_server.errors import AdapterError, ConfigError
from lorax_server.files.tokenizer_folder import FolderKey, TokenizerFolder
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.text.tokenizer import TextTokenizer, load_own_tokenizer, share_base_tokenizer
from lorax_server.types import ResolvedAdapter

MAX_SHARED_TOKENIZERS = 1024  # tokenizers with the base model's vocabulary
MAX_SHARED_TEMPLATE_CHARACTERS = 2**16  # a tokenizer with larger templates counts as its own
MAX_OWN_TOKENIZERS = 32  # other tokenizers; each may take tens of megabytes
MAX_FAILURES = 1024
FAILURE_TTL_S = 10.0  # a failure may be temporary
MAX_REASON_CHARACTERS = 500  # errors may quote untrusted files
FOLDER_PATH_PATTERN = re.compile(r"""(?<![^\s'"(=])/(?:[^\s/'":]+/)+""")  # the folders of an absolute path
logger = logging.getLogger(__name__)


def find_tokenizer_files(adapter: ResolvedAdapter) -> TokenizerFolder | None:
    """Return the tokenizer files that the adapter's source has listed, or None if the adapter has no tokenizer."""
    if adapter.folder is None or not adapter.tokenizer_files:
        return None
    stamps = dict(zip(adapter.tokenizer_files, adapter.tokenizer_stamps, strict=True))
    return TokenizerFolder(Path(adapter.folder), stamps)


class AdapterTokenizers:
    """Loads adapter tokenizers and caches them. Failures are cached for a short time. All methods are thread-safe.

    The adapter identity is not used as the cache key, because it does not cover the tokenizer files.
    """

    def __init__(
        self,
        base: TextTokenizer,
        base_folder: Path,
        sandbox: Sandbox,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the cache. Tokenizers are converted in `sandbox`, which the caller must close."""
        self._base = base
        self._base_folder = base_folder
        self._sandbox = sandbox
        self._lock = threading.Lock()  # guards the fields below
        self._shared_tokenizers: LRUCache[FolderKey, TextTokenizer] = LRUCache(MAX_SHARED_TOKENIZERS)
        self._own_tokenizers: LRUCache[FolderKey, TextTokenizer] = LRUCache(MAX_OWN_TOKENIZERS)
        self._failures: TTLCache[FolderKey, str] = TTLCache(MAX_FAILURES, FAILURE_TTL_S, timer=clock)

    def find(self, adapter: ResolvedAdapter) -> TextTokenizer:
        """Return the adapter's tokenizer, or the base model's tokenizer if the adapter has none. This may
        take seconds.
        """
        files = find_tokenizer_files(adapter)
        if files is None:
            return self._base
        return self.get_cached(files) or self.load_shared_tokenizer(files) or self.load_own_tokenizer(files)

    def get_cached(self, files: TokenizerFolder) -> TextTokenizer | None:
        """Return the cached tokenizer, or None if it is not cached. Raise AdapterError for a cached failure."""
        with self._lock:
            tokenizer = self._shared_tokenizers.get(files.key) or self._own_tokenizers.get(files.key)
            failure = self._failures.get(files.key)
        if tokenizer is None and failure is not None:
            raise AdapterError(failure)
        return tokenizer

    def load_shared_tokenizer(self, files: TokenizerFolder) -> TextTokenizer | None:
        """Return a tokenizer that shares the base model's vocabulary, or None if the vocabularies differ.

        This is fast, because only files are compared.
        """
        with self._caching_failures(files):
            tokenizer = share_base_tokenizer(files, self._base, self._base_folder)
        return None if tokenizer is None else self._store(files, tokenizer)

    def load_own_tokenizer(self, files: TokenizerFolder) -> TextTokenizer:
        """Load and return a tokenizer with its own vocabulary. This can be slow, depending on its regex patterns."""
        with self._caching_failures(files):
            tokenizer = load_own_tokenizer(files, self._base_folder, self._sandbox)
        return self._store(files, tokenizer)

    def _store(self, files: TokenizerFolder, tokenizer: TextTokenizer) -> TextTokenizer:
        size = sum(map(len, tokenizer.chat_templates.values()))
        shares = tokenizer.shares_vocabulary(self._base) and size <= MAX_SHARED_TEMPLATE_CHARACTERS
        with self._lock:
            (self._shared_tokenizers if tokenizer is self._base or shares else self._own_tokenizers)[files.key] = (
                tokenizer
            )
        return tokenizer

    @contextmanager
    def _caching_failures(self, files: TokenizerFolder) -> Iterator[None]:
        """Cache a load failure and raise it as AdapterError. The message omits server paths, which are only logged."""
        try:
            yield
        except (ConfigError, OSError) as error:
            logger.warning("cannot use the tokenizer in %s: %s", files.path, error)
            reason = str(error) if isinstance(error, ConfigError) else f"a file cannot be read: {error.strerror}"
            failure = f"adapter {files.path.name!r}: its tokenizer cannot be used: {self._hide_folders(files, reason)}"
            with self._lock:
                self._failures[files.key] = failure
            raise AdapterError(failure) from error

    def _hide_folders(self, files: TokenizerFolder, reason: str) -> str:
        for folder in (files.path, files.path.absolute(), self._base_folder, self._base_folder.absolute()):
            reason = reason.replace(f"{folder}/", "").replace(f"{folder}: ", "")
            reason = reason.replace(str(folder), folder.name) if folder.is_absolute() else reason
        return FOLDER_PATH_PATTERN.sub("", reason)[:MAX_REASON_CHARACTERS]
