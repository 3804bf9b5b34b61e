"""Renders chat templates. Templates are untrusted code, so they run in the sandbox."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from cachetools import TTLCache

from lorax_server.errors import TemplateError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import SandboxTask, TaskError, TaskKilledError, TaskTimeoutError

RENDER_MODULE = "lorax_server.text.render_task"
MAX_TEMPLATE_CHARACTERS = 4_000_000  # per prompt
RENDER_TASK = SandboxTask(
    f"{RENDER_MODULE}:render", cpu_s=2.0, memory_bytes=2**29, max_reply_bytes=4 * MAX_TEMPLATE_CHARACTERS
)
RENDER_TIMEOUT_S = 30.0
REJECTED_TEMPLATE_TTL_S = 60.0
MAX_REJECTED_TEMPLATES = 256


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens that it can use, keyed by variable name."""

    source: str
    special_tokens: Mapping[str, str]


class TemplateRenderer:
    """Renders chat templates in a sandbox. Each renderer belongs to one event loop.

    A template that exceeds its CPU time is rejected for `rejected_ttl_s` seconds.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        task: SandboxTask = RENDER_TASK,
        *,
        max_characters: int = MAX_TEMPLATE_CHARACTERS,
        rejected_ttl_s: float = REJECTED_TEMPLATE_TTL_S,
        timeout_s: float = RENDER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandbox = sandbox
        self._task = task
        self._max_characters = max_characters
        self._rejected_ttl_s = rejected_ttl_s
        self._timeout_s = timeout_s
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # by source and tenant
        self._rejected: TTLCache[str, bool] = TTLCache(MAX_REJECTED_TEMPLATES, rejected_ttl_s, timer=clock)  # by source

    async def render(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tenant: str = "", /, **variables: Any
    ) -> str:
        """Return the rendered prompt. `variables` are passed to the template, for example `tools`."""
        values = {**template.special_tokens, **variables}
        args = (template.source, messages, values, self._max_characters)
        if not self._rejected_ttl_s:
            return await self._render(template, args, tenant)
        lock = self._locks.setdefault((template.source, tenant), asyncio.Lock())
        async with lock:  # one request at a time, so a slow template is rejected after its first request
            if template.source in self._rejected:
                raise TemplateError(
                    f"the chat template took longer than {self._task.cpu_s:g} s and is not tried again for "
                    f"{self._rejected_ttl_s:g} s"
                )
            return await self._render(template, args, tenant)

    async def _render(self, template: ChatTemplate, args: tuple[Any, ...], tenant: str) -> str:
        try:
            prompt = await self._sandbox.run(self._task, *args, tenant=tenant, timeout_s=self._timeout_s)
        except TaskTimeoutError as error:
            self._rejected[template.source] = True
            raise TemplateError(f"the chat template cannot be used: {error}") from error
        except TaskKilledError as error:
            raise TemplateError(f"the chat template cannot be used, perhaps for lack of memory: {error}") from error
        except TaskError as error:
            raise TemplateError(str(error)) from error
        return prompt.decode()
