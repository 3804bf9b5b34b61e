"""The base model's tokenizer and those that adapters bring, and the threads on which long texts become tokens."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lorax_server.adapters.spec import Stamp, stamp_of
from lorax_server.chat_template import ChatTemplate, TemplateRenderer
from lorax_server.errors import AdapterError, ConfigError, TemplateError
from lorax_server.tokenizer import TextTokenizer, load_adapter_tokenizer
from lorax_server.types import Resolved

MAX_TOKENIZERS = 32  # of adapters; each may take tens of megabytes
SHORT = 1000  # characters that are tokens sooner than another thread has begun
NUM_THREADS = 2
_T = TypeVar("_T")


class Tokenizers:
    """Of one event loop."""

    def __init__(self, base: TextTokenizer, folder: Path) -> None:
        self.base = base
        self._folder = folder
        self._of_adapters: OrderedDict[tuple[str, tuple[Stamp, ...]], TextTokenizer] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")
        # An adapter's template is code that nobody vouches for: where it takes long, only other adapters' wait. If the
        # base model's does, it is because of the messages.
        self._renderer, self._adapter_renderer = TemplateRenderer(refuse_s=0), TemplateRenderer()

    async def start(self) -> None:
        await self._renderer.start()

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._renderer.close()
        await self._adapter_renderer.close()

    async def find(self, adapter: Resolved) -> TextTokenizer:
        """What an adapter's text is made with: the base model's tokenizer if it brings none."""
        if adapter.folder is None or not adapter.tokenizer_files:
            return self.base
        folder = Path(adapter.folder)
        try:
            # Not by the identity, which is that of the weights.
            key = adapter.folder, tuple(stamp_of(folder / file) for file in adapter.tokenizer_files)
            known = self._of_adapters.get(key)
            if known is None:
                known = await self._on_a_thread(lambda: load_adapter_tokenizer(folder, self.base, self._folder))
        except (ConfigError, OSError) as error:
            raise AdapterError(f"adapter {folder.name!r}: its tokenizer cannot be used: {error}") from error
        self._of_adapters[key] = known
        self._of_adapters.move_to_end(key)
        if len(self._of_adapters) > MAX_TOKENIZERS:
            self._of_adapters.popitem(last=False)
        return known

    async def encode(self, tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT:
            return tokenizer.encode(text, add_special_tokens)
        return await self._on_a_thread(lambda: tokenizer.encode(text, add_special_tokens))

    def template_of(self, tokenizer: TextTokenizer) -> str | None:
        """The adapter's own, else that of the base model."""
        return _default_template(tokenizer.chat_templates) or _default_template(self.base.chat_templates)

    async def render(self, tokenizer: TextTokenizer, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """Messages as one prompt, by the adapter's template if it has one."""
        source = self.template_of(tokenizer)
        if source is None:
            raise TemplateError(
                "the model has no chat template; use /v1/completions, or start the server with "
                "--tokenizer-config-path and a file that has one"
            )
        is_own = source == _default_template(self.base.chat_templates)
        renderer = self._renderer if is_own else self._adapter_renderer
        return await renderer.render(ChatTemplate(source, tokenizer.special_tokens), messages, **variables)

    async def _on_a_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _default_template(templates: Mapping[str, str]) -> str | None:
    return templates.get("default")
