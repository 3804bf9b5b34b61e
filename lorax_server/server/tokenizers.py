"""The tokenizers of the base model and of adapters, the threads that run them, and chat template rendering."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorax_server.errors import AdapterError, NoTemplateError
from lorax_server.files.tokenizer_folder import FolderKey, TokenizerFolder
from lorax_server.process_tuning import trim_malloc
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output.trials import GrammarTrials
from lorax_server.text.adapter_tokenizers import AdapterTokenizers, find_tokenizer_files
from lorax_server.text.chat_template import RENDER_MODULE, RENDER_TASK, ChatTemplate, TemplateRenderer
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.threads import DaemonThreads
from lorax_server.types import ResolvedAdapter, Structure, TokenTable

MAX_INLINE_CHARACTERS = 1000  # tokenizing fewer characters is faster than a thread switch
LONG_TEXT_CHARACTERS = 2**16  # tokenizing longer texts is slow and needs hundreds of bytes per character
NUM_THREADS = 2
NUM_SANDBOX_WORKERS = 2  # two, so that one slow task does not block other tasks
_T = TypeVar("_T")


class Tokenizers:
    """The server's tokenizers. An instance belongs to one event loop.

    Adapter tokenizers are untrusted: a regex in `tokenizer.json` can run for a long time on a short text and cannot be
    interrupted. They run on separate threads, never on the event loop. If slow tokenizers occupy all of these threads,
    other adapters with custom vocabularies are blocked, but requests for the base vocabulary are not.

    Long texts are tokenized one at a time, which limits memory use and keeps the other threads free.
    """

    def __init__(self, base: TextTokenizer, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.base = base
        # Adapter templates, tokenizer files and grammars are untrusted, so they are processed in a sandbox.
        self._sandbox = Sandbox(NUM_SANDBOX_WORKERS, preload=(RENDER_MODULE,))
        self._trials = GrammarTrials(self._sandbox)
        self._adapters = AdapterTokenizers(base, folder, self._sandbox, clock=clock)
        self._loading: dict[FolderKey, asyncio.Task[TextTokenizer]] = {}
        # The process exits without joining daemon threads, because a tokenizer may hang.
        self._base_threads = DaemonThreads("tokenizer", NUM_THREADS)
        self._adapter_threads = DaemonThreads("adapter-tokenizer", NUM_THREADS)
        self._file_threads = DaemonThreads("tokenizer-files", NUM_THREADS)
        self._long_text_thread, self._adapter_long_text_thread = (
            DaemonThreads("long-texts", 1),
            DaemonThreads("adapter-long-texts", 1),
        )
        # The base model's template is trusted, so a slow render does not reject it (`rejected_ttl_s=0`).
        self._renderer = TemplateRenderer(self._sandbox, rejected_ttl_s=0)
        self._adapter_renderer = TemplateRenderer(self._sandbox)

    async def start(self) -> None:
        """Start a sandbox worker before the first request needs it."""
        await self._sandbox.run(RENDER_TASK, "", [{}], {}, 1)

    async def close(self) -> None:
        """Stop all threads and the sandbox, without waiting for running tokenizers."""
        for task in self._loading.values():
            task.cancel()
        for threads in (
            self._base_threads,
            self._adapter_threads,
            self._file_threads,
            self._long_text_thread,
            self._adapter_long_text_thread,
        ):
            threads.close()
        await asyncio.to_thread(self._sandbox.close)

    async def find(self, adapter: ResolvedAdapter) -> TextTokenizer:
        """Return the adapter's tokenizer, or the base model's if the adapter has no tokenizer files."""
        files = find_tokenizer_files(adapter)
        return self.base if files is None else self._adapters.get_cached(files) or await self._load_once(files)

    async def encode(
        self, tokenizer: TextTokenizer, text: str, add_special_tokens: bool, truncate: int | None = None
    ) -> list[int]:
        """Return the token IDs of a text. If `truncate` is set, return only the last `truncate` tokens."""

        def work() -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens)
            return ids if truncate is None else ids[-truncate:]

        return await self.run(tokenizer, len(text), work)

    async def decode(self, tokenizer: TextTokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self.run(tokenizer, len(ids), partial(tokenizer.decode, ids, skip_special_tokens))

    async def run(self, tokenizer: TextTokenizer, size: int, work: Callable[[], _T]) -> _T:
        """Run `work` on the thread pool for this tokenizer. `size` is its cost in characters."""
        is_base = tokenizer.shares_vocabulary(self.base)
        if size > LONG_TEXT_CHARACTERS:
            threads = self._long_text_thread if is_base else self._adapter_long_text_thread
            return await threads.run(partial(_run_and_trim_malloc, work))
        if is_base and size <= MAX_INLINE_CHARACTERS:
            return work()
        return await (self._base_threads if is_base else self._adapter_threads).run(work)

    def find_template(self, tokenizer: TextTokenizer, has_tools: bool = False) -> str | None:
        """Return the adapter's chat template, or the base model's. Prefer a `tool_use` template if `has_tools`."""
        names = ("tool_use", "default") if has_tools else ("default",)
        templates = [each.chat_templates.get(name) for each in (tokenizer, self.base) for name in names]
        return next((template for template in templates if template), None)

    async def render(
        self, tokenizer: TextTokenizer, messages: list[dict[str, Any]], tenant: str = "", /, **variables: Any
    ) -> str:
        """Return the prompt, rendered with the adapter's chat template or the base model's template."""
        source = self.find_template(tokenizer, bool(variables.get("tools")))
        if source is None:
            raise NoTemplateError(
                "the model has no chat template; use /v1/completions, or start the server with "
                "--tokenizer-config-path and a file that contains a chat template"
            )
        is_base = source in self.base.chat_templates.values()
        renderer = self._renderer if is_base else self._adapter_renderer
        return await renderer.render(ChatTemplate(source, tokenizer.special_tokens), messages, tenant, **variables)

    async def check_grammar(
        self, tokenizer: TextTokenizer, structure: Structure, tenant: str
    ) -> tuple[Structure, TokenTable | None]:
        """Run a trial compile. Return the grammar with its size, and the token table unless it is the base model's."""
        is_base = tokenizer.shares_vocabulary(self.base)
        table = await self._file_threads.run(tokenizer.token_table)
        tried = self._trials.submit(structure, table, tenant)
        return await asyncio.wrap_future(tried), None if is_base else table

    # --- Adapter tokenizers -------------------------------------------------------------------------------------------

    async def _load_once(self, files: TokenizerFolder) -> TextTokenizer:
        """Return a tokenizer, which is loaded once for all concurrent requests. If a client disconnects, the load
        continues.
        """
        task = self._loading.get(files.key)
        if task is None:
            task = self._loading[files.key] = asyncio.create_task(self._load(files))
            task.add_done_callback(partial(self._forget, files.key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AdapterError("the server is shutting down; the tokenizer was not loaded") from None
            raise

    def _forget(self, key: FolderKey, task: asyncio.Task[TextTokenizer]) -> None:
        del self._loading[key]
        if not task.cancelled():
            task.exception()  # retrieve the exception, because asyncio logs unretrieved exceptions

    async def _load(self, files: TokenizerFolder) -> TextTokenizer:
        # The search for a shared vocabulary only reads files, on its own threads, so slow tokenizers do not delay it.
        shared = await self._file_threads.run(partial(self._adapters.load_shared_tokenizer, files))
        if shared is not None:
            return shared
        return await self._adapter_threads.run(partial(self._adapters.load_own_tokenizer, files))


def _run_and_trim_malloc(work: Callable[[], _T]) -> _T:
    try:
        return work()
    finally:
        trim_malloc()
