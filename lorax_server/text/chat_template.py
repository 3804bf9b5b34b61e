"""Chat templates turn messages into a prompt. They are untrusted code, rendered in another process."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cachetools import TTLCache

from lorax_server.errors import BusyError, LoraxError, TemplateError
from lorax_server.text.template_program import LENGTH, TOO_LONG

logger = logging.getLogger(__name__)

START_S = 60.0  # a busy machine takes its time to start a process
MANY = 256  # messages that are written at once
WAIT_S = 30.0
RETRY_S = 5.0
REFUSED_S = 60.0
MAX_REFUSED = 256
LONGEST_CHARACTER = 6  # bytes in a frame: "\u0000"
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no secrets


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a model or an adapter, and the special tokens by their names there."""

    source: str
    special_tokens: Mapping[str, str]


class TemplateRenderer:
    """Renders in one other process, one template at a time. Belongs to one event loop.

    A render may use `cpu_s` of the process's own CPU time, so that a busy machine is not the template's fault. A
    template that uses more ends with its process, and is refused for `refuse_s`; the next request gets a new process. A
    request that has waited `wait_s` for its turn or for the process is told to come back later.
    """

    def __init__(
        self,
        cpu_s: float = 2.0,
        max_output: int = 4_000_000,
        max_memory: int = 2**29,
        refuse_s: float = REFUSED_S,
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s = cpu_s
        self._max_output = max_output
        self._max_memory = max_memory
        self._refuse_s = refuse_s
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[str] | None = None
        self._process: Process | None = None
        self._refused: TTLCache[str, bool] = TTLCache(MAX_REFUSED, refuse_s, timer=clock)  # by source
        self._is_closed = False

    async def start(self) -> None:
        """Have a process ready before the first request needs it."""
        async with self._turn:
            await self._ensure_process()

    async def close(self) -> None:
        """End the process. Requests that still wait get an error."""
        self._is_closed = True
        if self._process is not None:
            _kill(self._process)
        async with self._turn:
            await self._end()

    async def render(self, template: ChatTemplate, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """Return the prompt. The template also sees `variables`: `add_generation_prompt`, `tools` and others."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise BusyError(f"{self._wait_s:g} s went by while other chats were made into prompts", RETRY_S) from None
        # A request that is cancelled must not leave its reply to the next one: the exchange ends first.
        self._running = asyncio.create_task(self._exchange(template, messages, variables))
        self._running.add_done_callback(self._pass_on)
        return await asyncio.shield(self._running)

    def _pass_on(self, done: asyncio.Task[str]) -> None:
        self._turn.release()
        if not done.cancelled():
            done.exception()  # retrieved, since no request may be left to do so

    async def _exchange(self, template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        request = await _to_frame(template, messages, variables)
        if template.source in self._refused:
            raise TemplateError(
                f"the chat template took longer than {self._cpu_s:g} s, and is not tried again for {self._refuse_s:g} s"
            )
        process = await self._ensure_process()
        try:
            async with asyncio.timeout(self._wait_s):
                reply = await self._ask(process, request)
                is_last = bool(await self._read(process))
        except TimeoutError:
            await self._end()
            logger.warning("the process that renders chat templates did not get on for %g s", self._wait_s)
            raise BusyError(f"{self._wait_s:g} s went by without a prompt: the machine is busy", RETRY_S) from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            await self._end()
            raise self._failure(process, template.source) from error
        except asyncio.CancelledError:
            await self._end()
            raise
        if is_last:
            await self._end()
        return _to_text(reply)

    # --- The process --------------------------------------------------------------------------------------------------

    async def _ensure_process(self) -> Process:
        if self._is_closed:
            raise _stopping()
        if self._process is not None and _has_ended(self._process):
            logger.warning("the process that renders chat templates has ended by itself")
            await self._end()
        if self._process is None:
            self._process = await self._launch()
            try:
                async with asyncio.timeout(START_S):
                    await self._read(self._process)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                await self._end()
                raise BusyError("the process that renders chat templates does not start; see the log") from error
            except asyncio.CancelledError:
                await self._end()
                raise
        return self._process

    async def _launch(self) -> Process:
        limits = (str(self._max_output), str(self._max_memory), str(self._cpu_s))
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        command = (sys.executable, "-m", "lorax_server.text.template_program", *limits)
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
        )

    async def _end(self) -> None:
        """Kill the process if there is one, and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        while await process.stdout.read(2**16):  # read the rest, or its pipe stays open
            pass
        await process.wait()

    async def _ask(self, process: Process, request: bytes) -> bytes:
        assert process.stdin is not None
        process.stdin.write(LENGTH.pack(len(request)) + request)
        await process.stdin.drain()
        return await self._read(process)

    async def _read(self, process: Process) -> bytes:
        assert process.stdout is not None
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if length > LONGEST_CHARACTER * self._max_output + 2**16:
            raise ValueError(f"a frame of {length} bytes")
        return await process.stdout.readexactly(length)

    def _failure(self, process: Process, source: str) -> LoraxError:
        """Return the error for a process that has ended."""
        if self._is_closed:
            return _stopping()
        if process.returncode == -TOO_LONG:
            self._refused[source] = True
            return TemplateError(f"the chat template takes longer than {self._cpu_s:g} s")
        return TemplateError("the chat template ended the process that renders it; it may use too much memory")


def _stopping() -> BusyError:
    return BusyError("the server is stopping, no chat template is rendered any more")


def _has_ended(process: Process) -> bool:
    return process.returncode is not None or (process.stdout is not None and process.stdout.at_eof())


def _kill(process: Process) -> None:
    """Kill a process by its id: `Process.kill` polls first, and would take the exit status from asyncio."""
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, signal.SIGKILL)


async def _to_frame(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> bytes:
    if not messages:
        raise TemplateError("a chat has at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise TemplateError("a message is an object with a role and a content")
    request = {"source": template.source, "variables": {**template.special_tokens, **variables}}
    try:
        head = json.dumps(request, ensure_ascii=False).encode()
        return b'%s, "messages": [%s]}' % (head[:-1], b", ".join([batch async for batch in _write(messages)]))
    except UnicodeEncodeError as error:
        raise TemplateError("the messages hold characters that are no text (lone surrogates)") from error
    except RecursionError as error:
        raise TemplateError("the messages are nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise TemplateError(f"the messages are not JSON: {error}") from error


async def _write(messages: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Encode some messages at a time: there may be thousands, and other tasks need the event loop."""
    for start in range(0, len(messages), MANY):
        if start:
            await asyncio.sleep(0)
        yield json.dumps(messages[start : start + MANY], ensure_ascii=False).encode()[1:-1]


def _to_text(reply: bytes) -> str:
    answer = json.loads(reply)
    if "error" in answer:
        raise TemplateError(answer["error"])
    return str(answer["text"])
