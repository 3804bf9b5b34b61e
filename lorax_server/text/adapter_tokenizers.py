"""The tokenizers that adapters bring, loaded once and kept up to a number: for the server and for scripts alike."""

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
from lorax_server.types import Resolved

MAX_SHARED_TOKENIZERS = 1024  # tokenizers that share the base model's vocabulary and have at most
MAX_SHARED_TEMPLATE_CHARACTERS = 2**16  # characters of templates
MAX_OWN_TOKENIZERS = 32  # others, each of which may take tens of megabytes
MAX_FAILURES = 1024
FAILURE_TTL_S = 10.0  # a failure may be due to the machine, and pass
MAX_REASON = 500  # characters: files may make an error quote anything
FOLDERS = re.compile(r"""(?<![^\s'"(=])/(?:[^\s/'":]+/)+""")  # the folders of an absolute path
logger = logging.getLogger(__name__)


def find_tokenizer_files(adapter: Resolved) -> TokenizerFolder | None:
    """Return the files of an adapter's own tokenizer, as its source has seen them; None if it brings none."""
    if adapter.folder is None or not adapter.tokenizer_files:
        return None
    stamps = dict(zip(adapter.tokenizer_files, adapter.tokenizer_stamps, strict=True))
    return TokenizerFolder(Path(adapter.folder), stamps)


class AdapterTokenizers:
    """Keeps the tokenizers used last, and remembers failures for a while. Any thread may use it.

    The key is not the adapter's identity, which covers its weights only.
    """

    def __init__(
        self,
        base: TextTokenizer,
        base_folder: Path,
        sandbox: Sandbox,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `sandbox` to convert tokenizers; whoever made it closes it."""
        self._base = base
        self._base_folder = base_folder
        self._sandbox = sandbox
        self._lock = threading.Lock()  # guards all below
        self._light: LRUCache[FolderKey, TextTokenizer] = LRUCache(MAX_SHARED_TOKENIZERS)
        self._heavy: LRUCache[FolderKey, TextTokenizer] = LRUCache(MAX_OWN_TOKENIZERS)
        self._failures: TTLCache[FolderKey, str] = TTLCache(MAX_FAILURES, FAILURE_TTL_S, timer=clock)

    def find(self, adapter: Resolved) -> TextTokenizer:
        """Return the tokenizer of an adapter, the base model's if it brings none. May take seconds."""
        files = find_tokenizer_files(adapter)
        return self._base if files is None else self.recall(files) or self.share(files) or self.build(files)

    def recall(self, files: TokenizerFolder) -> TextTokenizer | None:
        """Return a tokenizer that was loaded before, or raise the failure of a moment ago."""
        with self._lock:
            tokenizer = self._light.get(files.key) or self._heavy.get(files.key)
            failure = self._failures.get(files.key)
        if tokenizer is None and failure is not None:
            raise AdapterError(failure)
        return tokenizer

    def share(self, files: TokenizerFolder) -> TextTokenizer | None:
        """Load a tokenizer that has the base model's vocabulary; None if it has its own. Files are only compared."""
        with self._remembering_failures(files):
            tokenizer = share_base_tokenizer(files, self._base, self._base_folder)
        return None if tokenizer is None else self._keep(files, tokenizer)

    def build(self, files: TokenizerFolder) -> TextTokenizer:
        """Load a tokenizer with a vocabulary of its own. May take as long as its patterns make it."""
        with self._remembering_failures(files):
            tokenizer = load_own_tokenizer(files, self._base_folder, self._sandbox)
        return self._keep(files, tokenizer)

    def _keep(self, files: TokenizerFolder, tokenizer: TextTokenizer) -> TextTokenizer:
        size = sum(map(len, tokenizer.chat_templates.values()))
        shares = tokenizer.shares_vocabulary(self._base) and size <= MAX_SHARED_TEMPLATE_CHARACTERS
        with self._lock:
            (self._light if tokenizer is self._base or shares else self._heavy)[files.key] = tokenizer
        return tokenizer

    @contextmanager
    def _remembering_failures(self, files: TokenizerFolder) -> Iterator[None]:
        """Tell the client why a tokenizer cannot be used. Where the server keeps its files is for its log only."""
        try:
            yield
        except (ConfigError, OSError) as error:
            logger.warning("the tokenizer in %s cannot be used: %s", files.path, error)
            reason = str(error) if isinstance(error, ConfigError) else f"a file cannot be read: {error.strerror}"
            failure = f"adapter {files.path.name!r}: its tokenizer cannot be used: {self._hide_folders(files, reason)}"
            with self._lock:
                self._failures[files.key] = failure
            raise AdapterError(failure) from error

    def _hide_folders(self, files: TokenizerFolder, reason: str) -> str:
        for folder in (files.path, files.path.absolute(), self._base_folder, self._base_folder.absolute()):
            reason = reason.replace(f"{folder}/", "").replace(f"{folder}: ", "")
            reason = reason.replace(str(folder), folder.name) if folder.is_absolute() else reason
        return FOLDERS.sub("", reason)[:MAX_REASON]
