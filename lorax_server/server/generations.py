"""Generations by an engine in another process: those that make up one answer run together."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.generation.generation import Completion, Generation, TokenEvent
from lorax_server.server.http.sse import Shortcut
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Output, Request, Started

_Item = tuple[int, list[TokenEvent]] | BaseException | None


class RemoteGeneration(Generation):
    """A generation whose outputs come from a `RemoteEngine`. Its request is sent when it is read."""

    def __init__(self, engine: RemoteEngine, request: Request, tokenizer: TextTokenizer) -> None:
        super().__init__(request, tokenizer.detokenizer)
        self.tokenizer = tokenizer
        self.started: Started | None = None
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self._shortcut: Shortcut | None = None
        self._write: Callable[[list[TokenEvent]], bytes] | None = None
        self._engine = engine

    @property
    def seed(self) -> int | None:
        """The seed of a sampled generation; None if it is greedy."""
        sampling = self.request.sampling
        return None if sampling.is_greedy else sampling.seed

    async def stream(self) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield events as they come. A reader that closes the stream ends the request."""
        self.sent_at = time.monotonic()
        try:
            async with aclosing(self._engine.stream(self.request, self._take)) as stream:
                async for outputs in stream:
                    if self.first_at is None:
                        self.first_at, self.started = time.monotonic(), outputs[0].started
                    for output in outputs:
                        if not self.is_done:  # the engine does not know yet that a stop string has ended it
                            self.append_output(output)
                    yield self.take_events()
                    if self.is_done:
                        return
        finally:
            self._write = None  # it refers to this generation, which would stay until Python looks for such rings

    def use(self, shortcut: Shortcut, write: Callable[[list[TokenEvent]], bytes]) -> None:
        """Write events by the shortcut, if it is open: neither the first, nor the last, nor any that a reader has."""
        self._shortcut, self._write = shortcut, write

    def _take(self, outputs: Sequence[Output]) -> bool:
        """Handle outputs in place of the reader of `stream`, which waits for them; False if the reader must do it."""
        shortcut, write = self._shortcut, self._write
        if shortcut is None or write is None or self.first_at is None or not shortcut.is_open:
            return False
        for output in outputs:
            self.append_output(output)
            if self.is_done:  # by a stop string; the reader finds the events
                return False
        shortcut.write(write(self.take_events()))
        return True

    def stop(self, error: LoraxError) -> None:
        """End the request; its reader gets the error."""
        self._engine.abort(self.request.request_id, error)


def count_cached(generations: Sequence[RemoteGeneration]) -> int:
    """Count the prompt tokens that were not computed; a prompt with several answers counts once."""
    by_prompt: dict[int, int] = {}  # all answers to a prompt share its list of tokens
    for generation in generations:
        cached = 0 if generation.started is None else generation.started.cached_tokens
        prompt = id(generation.request.prompt_ids)
        by_prompt[prompt] = max(cached, by_prompt.get(prompt, 0))
    return sum(by_prompt.values())


async def finish_all(generations: Sequence[RemoteGeneration]) -> list[Completion]:
    """Read the streams of all generations, whose `events` are complete then. The first that fails ends the others."""
    events: list[list[TokenEvent]] = [[] for _ in generations]
    async with aclosing(interleave(generations)) as stream:
        async for index, new_events in stream:
            events[index] += new_events
    for generation, its_events in zip(generations, events, strict=True):
        generation.events = its_events
    return [generation.completion for generation in generations]


async def interleave(generations: Sequence[RemoteGeneration]) -> AsyncGenerator[tuple[int, list[TokenEvent]], None]:
    """Yield the events of all generations as they come, each with its generation's index.

    The first generation that fails ends the others.
    """
    if len(generations) == 1:
        async with aclosing(generations[0].stream()) as stream:
            async for events in stream:
                yield 0, events
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(index, generation, queue)) for index, generation in enumerate(generations)]
    num_running = len(tasks)
    try:
        while num_running:
            match await queue.get():
                case None:
                    num_running -= 1
                case BaseException() as error:
                    raise error
                case item:
                    yield item
    finally:
        await cancel_all(tasks)


async def _feed(index: int, generation: RemoteGeneration, queue: "asyncio.Queue[_Item]") -> None:
    try:
        async with aclosing(generation.stream()) as stream:
            async for events in stream:
                queue.put_nowait((index, events))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def cancel_all(tasks: "Sequence[asyncio.Task[Any]]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
