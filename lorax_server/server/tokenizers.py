"""The base model's tokenizer and those that adapters bring, and the threads on which texts become tokens."""

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
from lorax_server.text.chat_template import RENDER, RENDER_MODULE, ChatTemplate, TemplateRenderer
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.threads import DaemonThreads
from lorax_server.types import Resolved, Structure, TokenTable

SHORT = 1000  # characters that become tokens sooner than another thread has begun
LONG = 2**16  # characters from which on a text takes long, and hundreds of bytes of memory for each
NUM_THREADS = 2
NUM_SANDBOX_WORKERS = 2  # so that one slow task does not hold up all others
_T = TypeVar("_T")


class Tokenizers:
    """All tokenizers of a server. It belongs to one event loop.

    An adapter's vocabulary comes with patterns that nobody vouches for, and a pattern can take very long for a short
    text. Nothing can end it, so such tokenizers work on threads of their own, never on the event loop. The limit: as
    many slow ones as these threads hold up all other adapters with a vocabulary of their own, but no other requests.

    Long texts become tokens one after the other, so that they neither take all memory nor hold up other requests.
    """

    def __init__(self, base: TextTokenizer, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.base = base
        # Adapter templates, tokenizer files and grammars are untrusted.
        self._sandbox = Sandbox(NUM_SANDBOX_WORKERS, preload=(RENDER_MODULE,))
        self._trials = GrammarTrials(self._sandbox)
        self._adapters = AdapterTokenizers(base, folder, self._sandbox, clock=clock)
        self._loading: dict[FolderKey, asyncio.Task[TextTokenizer]] = {}
        # The process ends without waiting for these threads, whose work may take any time.
        self._of_base = DaemonThreads("tokenizer", NUM_THREADS)
        self._of_others = DaemonThreads("tokenizer-of-adapters", NUM_THREADS)
        self._reading = DaemonThreads("tokenizer-files", NUM_THREADS)
        self._long, self._long_of_others = DaemonThreads("long-texts", 1), DaemonThreads("long-texts-of-adapters", 1)
        # If the base model's template is slow, the messages are to blame, and the template is not rejected.
        self._renderer = TemplateRenderer(self._sandbox, reject_s=0)
        self._adapter_renderer = TemplateRenderer(self._sandbox)

    async def start(self) -> None:
        """Start a sandbox worker before the first request needs it."""
        await self._sandbox.run(RENDER, "", [{}], {}, 1)

    async def close(self) -> None:
        """Close without waiting for tokenizers that are loading or at work."""
        for task in self._loading.values():
            task.cancel()
        for threads in (self._of_base, self._of_others, self._reading, self._long, self._long_of_others):
            threads.close()
        await asyncio.to_thread(self._sandbox.close)

    async def find(self, adapter: Resolved) -> TextTokenizer:
        """Return an adapter's tokenizer; the base model's if it brings none."""
        files = find_tokenizer_files(adapter)
        return self.base if files is None else self._adapters.recall(files) or await self._load_once(files)

    async def encode(
        self, tokenizer: TextTokenizer, text: str, add_special_tokens: bool, truncate: int | None = None
    ) -> list[int]:
        """Return a text's tokens; only the last ones if there are more than `truncate`."""

        def work() -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens)
            return ids if truncate is None else ids[-truncate:]

        return await self.run(tokenizer, len(text), work)

    async def decode(self, tokenizer: TextTokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return await self.run(tokenizer, len(ids), partial(tokenizer.decode, ids, skip_special_tokens))

    async def run(self, tokenizer: TextTokenizer, size: int, work: Callable[[], _T]) -> _T:
        """Do work with a tokenizer that takes as long as a text of `size` characters, without holding up others."""
        is_of_base = tokenizer.shares_vocabulary(self.base)
        if size > LONG:
            threads = self._long if is_of_base else self._long_of_others
            return await threads.run(partial(_give_back_after, work))
        if is_of_base and size <= SHORT:
            return work()
        return await (self._of_base if is_of_base else self._of_others).run(work)

    def template_of(self, tokenizer: TextTokenizer, has_tools: bool = False) -> str | None:
        """Return the adapter's own chat template, else that of the base model. Some have another one for tools."""
        names = ("tool_use", "default") if has_tools else ("default",)
        templates = [each.chat_templates.get(name) for each in (tokenizer, self.base) for name in names]
        return next((template for template in templates if template), None)

    async def render(
        self, tokenizer: TextTokenizer, messages: list[dict[str, Any]], tenant: str = "", /, **variables: Any
    ) -> str:
        """Write messages as one prompt, by the adapter's template if it has one."""
        source = self.template_of(tokenizer, bool(variables.get("tools")))
        if source is None:
            raise NoTemplateError(
                "the model has no chat template; use /v1/completions, or start the server with "
                "--tokenizer-config-path and a file that has one"
            )
        is_of_base = source in self.base.chat_templates.values()
        renderer = self._renderer if is_of_base else self._adapter_renderer
        return await renderer.render(ChatTemplate(source, tokenizer.special_tokens), messages, tenant, **variables)

    async def check_grammar(
        self, tokenizer: TextTokenizer, structure: Structure, tenant: str
    ) -> tuple[Structure, TokenTable | None]:
        """Try a grammar in the sandbox. Return it with its size, and the vocabulary if it is not the base model's."""
        is_of_base = tokenizer.shares_vocabulary(self.base)
        table = await self._reading.run(tokenizer.token_table)
        tried = self._trials.submit(structure, table, tenant)
        return await asyncio.wrap_future(tried), None if is_of_base else table

    # --- Tokenizers of adapters ---------------------------------------------------------------------------------------

    async def _load_once(self, files: TokenizerFolder) -> TextTokenizer:
        """Load a tokenizer for all requests that ask meanwhile. A client that leaves does not end it."""
        task = self._loading.get(files.key)
        if task is None:
            task = self._loading[files.key] = asyncio.create_task(self._load(files))
            task.add_done_callback(partial(self._forget, files.key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AdapterError("the server is stopping, no tokenizer is loaded any more") from None
            raise

    def _forget(self, key: FolderKey, task: asyncio.Task[TextTokenizer]) -> None:
        del self._loading[key]
        if not task.cancelled():
            task.exception()  # or asyncio complains where no request is left to ask for it

    async def _load(self, files: TokenizerFolder) -> TextTokenizer:
        # Shared vocabularies are found on threads of their own, where no slow tokenizer is in the way.
        shared = await self._reading.run(partial(self._adapters.share, files))
        if shared is not None:
            return shared
        return await self._of_others.run(partial(self._adapters.build, files))


def _give_back_after(work: Callable[[], _T]) -> _T:
    try:
        return work()
    finally:
        trim_malloc()
