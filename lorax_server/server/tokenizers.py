"""The base model's tokenizer and those that adapters bring, and the threads on which texts become tokens."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorax_server.adapters.sources.finder import Recent
from lorax_server.errors import AdapterError, ConfigError, NoTemplateError
from lorax_server.files.plain_file import Stamp
from lorax_server.files.tokenizer_folder import TokenizerFolder
from lorax_server.machine import give_back_memory
from lorax_server.text.chat_template import ChatTemplate, TemplateRenderer
from lorax_server.text.conversion import Converter
from lorax_server.text.tokenizer import TextTokenizer, load_own_tokenizer, share_base_tokenizer
from lorax_server.types import Resolved

MAX_LIGHT = 1024  # tokenizers of adapters that share the base model's vocabulary and have no more than
LIGHT_TEMPLATES = 2**16  # characters of templates
MAX_HEAVY = 32  # others, each of which may take tens of megabytes
MAX_FAILURES = 1024
FAILURE_S = 10.0  # how long it is not tried again
MAX_REASON = 500  # characters: files may make an error quote anything
SHORT = 1000  # characters that are tokens sooner than another thread has begun
LONG = 2**16  # more than so many take long, and hundreds of bytes of memory each
NUM_THREADS = 2
FOLDERS = re.compile(r"""(?<![^\s'"(=])/(?:[^\s/'":]+/)+""")  # those of an absolute path
logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Key = tuple[str, tuple[tuple[str, Stamp], ...]]  # an adapter's folder, and the files in it


class Tokenizers:
    """Of one event loop.

    An adapter's vocabulary comes with patterns that nobody vouches for, and a pattern can take very long for a short
    text. Nothing can end it, so such tokenizers work on threads of their own, never on the event loop. The limit: as
    many slow ones as these have threads hold up all other adapters with a vocabulary of their own, but nobody else.

    Long texts become tokens one after the other, so that they neither take all memory nor hold up the others.
    """

    def __init__(self, base: TextTokenizer, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.base = base
        self._folder = folder
        self._clock = clock
        self._light: Recent[_Key, TextTokenizer] = Recent(MAX_LIGHT)
        self._heavy: Recent[_Key, TextTokenizer] = Recent(MAX_HEAVY)
        self._failures: Recent[_Key, tuple[float, str]] = Recent(MAX_FAILURES)  # until when, and why
        self._loading: dict[_Key, asyncio.Task[TextTokenizer]] = {}
        self._converter = Converter()
        self._of_base = ThreadPoolExecutor(NUM_THREADS, "tokenizer")
        self._reading, self._of_others = _Lane("tokenizer-files"), _Lane("tokenizer-of-adapters")
        self._long, self._long_of_others = _Lane("long-texts", 1), _Lane("long-texts-of-adapters", 1)
        # An adapter's template is code that nobody vouches for: where it takes long, only other adapters' wait. If the
        # base model's does, it is because of the messages.
        self._renderer, self._adapter_renderer = TemplateRenderer(refuse_s=0), TemplateRenderer()

    async def start(self) -> None:
        await self._renderer.start()

    async def close(self) -> None:
        """It waits for no tokenizer, neither being made nor at work."""
        self._converter.close()
        for task in self._loading.values():
            task.cancel()
        self._of_base.shutdown(wait=False, cancel_futures=True)
        await self._renderer.close()
        await self._adapter_renderer.close()

    async def find(self, adapter: Resolved) -> TextTokenizer:
        """What an adapter's text is made with: the base model's tokenizer if it brings none."""
        if adapter.folder is None or not adapter.tokenizer_files:
            return self.base
        # Not by the identity, which is that of the weights.
        vouched = tuple(zip(adapter.tokenizer_files, adapter.tokenizer_stamps, strict=True))
        key = adapter.folder, vouched
        known = self._light.recall(key) or self._heavy.recall(key)
        return known or await self._load_once(key, TokenizerFolder(Path(adapter.folder), dict(vouched)))

    async def encode(
        self, tokenizer: TextTokenizer, text: str, add_special_tokens: bool, truncate: int | None = None
    ) -> list[int]:
        """A text's tokens; only the last ones if there are more than `truncate`."""
        return await self.run(tokenizer, len(text), partial(_encode, tokenizer, text, add_special_tokens, truncate))

    async def locate(self, tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        """Find where in a text each of its tokens begins."""
        return await self.run(tokenizer, len(text), partial(tokenizer.locate, text, add_special_tokens))

    async def decode(self, tokenizer: TextTokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self.run(tokenizer, len(ids), partial(tokenizer.decode, ids, skip_special_tokens))

    async def run(self, tokenizer: TextTokenizer, size: int, work: Callable[[], _T]) -> _T:
        """Do something with a tokenizer that takes as long as a text of `size` characters, where nobody else waits."""
        is_of_base = tokenizer.shares_vocabulary(self.base)
        if size > LONG:
            lane = self._long if is_of_base else self._long_of_others
            return await lane.run(partial(_give_back_after, work))
        if not is_of_base:
            return await self._of_others.run(work)
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._of_base, work)

    def template_of(self, tokenizer: TextTokenizer) -> str | None:
        """The adapter's own, else that of the base model."""
        return _default_template(tokenizer.chat_templates) or _default_template(self.base.chat_templates)

    async def render(self, tokenizer: TextTokenizer, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """Messages as one prompt, by the adapter's template if it has one."""
        source = self.template_of(tokenizer)
        if source is None:
            raise NoTemplateError(
                "the model has no chat template; use /v1/completions, or start the server with "
                "--tokenizer-config-path and a file that has one"
            )
        is_own = source == _default_template(self.base.chat_templates)
        renderer = self._renderer if is_own else self._adapter_renderer
        return await renderer.render(ChatTemplate(source, tokenizer.special_tokens), messages, **variables)

    # --- Those of adapters --------------------------------------------------------------------------------------------

    async def _load_once(self, key: _Key, files: TokenizerFolder) -> TextTokenizer:
        """For all who ask meanwhile; who goes away does not end it."""
        self._check_failures(key)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(key, files))
            task.add_done_callback(partial(self._forget, key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AdapterError("the server is stopping, no tokenizer is loaded any more") from None
            raise

    def _forget(self, key: _Key, task: asyncio.Task[TextTokenizer]) -> None:
        del self._loading[key]
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def _load(self, key: _Key, files: TokenizerFolder) -> TextTokenizer:
        try:
            found = await self._share_or_build(files)
        except (ConfigError, OSError) as error:
            failure = self._failure(files.path, error)
            self._failures[key] = self._clock() + FAILURE_S, str(failure)
            raise failure from error
        (self._light if self._is_light(found) else self._heavy)[key] = found
        return found

    async def _share_or_build(self, files: TokenizerFolder) -> TextTokenizer:
        """Whether an adapter shares the base model's vocabulary is found out where no adapter's own is in the way."""
        shared = await self._reading.run(partial(share_base_tokenizer, files, self.base, self._folder))
        if shared is not None:
            return shared
        return await self._of_others.run(partial(load_own_tokenizer, files, self._folder, self._converter))

    def _is_light(self, found: TextTokenizer) -> bool:
        size = sum(len(template) for template in found.chat_templates.values())
        return found is self.base or (found.shares_vocabulary(self.base) and size <= LIGHT_TEMPLATES)

    def _check_failures(self, key: _Key) -> None:
        until, why = self._failures.recall(key) or (0.0, "")
        if why and self._clock() < until:
            raise AdapterError(why)

    def _failure(self, folder: Path, error: ConfigError | OSError) -> AdapterError:
        """Where the server keeps its files is for its log only."""
        logger.warning("the tokenizer in %s cannot be used: %s", folder, error)
        reason = str(error) if isinstance(error, ConfigError) else f"a file cannot be read: {error.strerror}"
        for known in (folder, folder.absolute(), self._folder, self._folder.absolute()):
            reason = reason.replace(f"{known}/", "").replace(f"{known}: ", "")
            reason = reason.replace(str(known), known.name) if known.is_absolute() else reason
        reason = FOLDERS.sub("", reason)[:MAX_REASON]
        return AdapterError(f"adapter {folder.name!r}: its tokenizer cannot be used: {reason}")


class _Lane:
    """A few threads for work that may take any time.

    The process ends without waiting for them, while it would wait for those of a ThreadPoolExecutor. A caller that
    stops waiting does not free its thread, which is still at work.
    """

    def __init__(self, name: str, num_threads: int = NUM_THREADS) -> None:
        self._name = name
        self._turns = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[[], _T]) -> _T:
        await self._turns.acquire()
        loop, result = asyncio.get_running_loop(), Future[_T]()
        result.set_running_or_notify_cancel()  # so that cancelling the caller does not settle it

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.release)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except BaseException:
            self._turns.release()
            raise
        return await asyncio.wrap_future(result)


def _encode(tokenizer: TextTokenizer, text: str, add_special_tokens: bool, truncate: int | None) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens)
    return ids if truncate is None else ids[-truncate:]


def _give_back_after(work: Callable[[], _T]) -> _T:
    try:
        return work()
    finally:
        give_back_memory()


def _default_template(templates: Mapping[str, str]) -> str | None:
    return templates.get("default")
