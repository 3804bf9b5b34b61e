"""Contains generations that run in the engine process, and helpers that run all generations in a response together."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.generation.generation import Completion, Generation, TokenEvent
from lorax_server.server.http.sse import DirectWriter
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Output, Request, StartInfo

MAX_INPUTS_IN_FLIGHT = 2048  # inputs of all requests in the engine; several full steps
MAX_INPUTS_PER_REQUEST = 512  # maximum inputs of one request; twice the default number of running sequences
_QueueItem = tuple[int, list[TokenEvent]] | BaseException | None


class RemoteGeneration(Generation):
    """A generation whose outputs come from a `RemoteEngine`. The request is submitted when `stream` is first read."""

    def __init__(self, engine: RemoteEngine, request: Request, tokenizer: TextTokenizer) -> None:
        super().__init__(request, tokenizer.detokenizer)
        self.tokenizer = tokenizer
        self.start_info: StartInfo | None = None
        self.submitted_at: float | None = None
        self.first_output_at: float | None = None
        self._direct_writer: DirectWriter | None = None
        self._write: Callable[[list[TokenEvent]], bytes] | None = None
        self._engine = engine

    @property
    def seed(self) -> int | None:
        """The sampling seed, or None for greedy decoding."""
        sampling = self.request.sampling
        return None if sampling.is_greedy else sampling.seed

    async def stream(self) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield token events as they arrive. Closing the stream aborts the request."""
        self.submitted_at = time.monotonic()
        try:
            async with aclosing(self._engine.stream(self.request, self._try_direct_write)) as stream:
                async for outputs in stream:
                    if self.first_output_at is None:
                        self.first_output_at, self.start_info = time.monotonic(), outputs[0].start_info
                    for output in outputs:
                        if not self.is_done:  # the engine does not know yet that a stop string matched
                            self.append_output(output)
                    yield self.pop_events()
                    if self.is_done:
                        return
        finally:
            self._write = None  # break a reference cycle: `_write` refers to this generation

    def set_direct_writer(self, direct_writer: DirectWriter, write: Callable[[list[TokenEvent]], bytes]) -> None:
        """Write events directly to the open connection. The first and last events still go through `stream`."""
        self._direct_writer, self._write = direct_writer, write

    def _try_direct_write(self, outputs: Sequence[Output]) -> bool:
        """Write outputs directly to the connection. Return False if the reader of `stream` must handle them."""
        direct_writer, write = self._direct_writer, self._write
        if direct_writer is None or write is None or self.first_output_at is None or not direct_writer.is_open:
            return False
        for output in outputs:
            self.append_output(output)
            if self.is_done:  # a stop string matched, so the `stream` reader handles the last events
                return False
        direct_writer.write(write(self.pop_events()))
        return True

    def stop(self, error: LoraxError) -> None:
        """Abort the request and raise `error` in its reader."""
        self._engine.abort(self.request.request_id, error)


def count_cached_tokens(generations: Sequence[RemoteGeneration]) -> int:
    """Return the number of prompt tokens found in the prefix cache.

    A prompt with several completions counts once for each adapter.
    """
    by_prompt: dict[tuple[int, str], int] = {}  # by `id`, because completions of one prompt share its token list
    for generation in generations:
        cached = 0 if generation.start_info is None else generation.start_info.cached_tokens
        prompt = id(generation.request.prompt_ids), generation.request.adapter_identity
        by_prompt[prompt] = max(cached, by_prompt.get(prompt, 0))
    return sum(by_prompt.values())


async def finish_all(generations: Sequence[RemoteGeneration]) -> list[Completion]:
    """Run all generations, set their `events` and return their completions. If one generation fails, all other
    generations are aborted.
    """
    events: list[list[TokenEvent]] = [[] for _ in generations]
    async with aclosing(interleave(generations)) as stream:
        async for index, new_events in stream:
            events[index] += new_events
    for generation, generation_events in zip(generations, events, strict=True):
        generation.events = generation_events
    return [generation.completion for generation in generations]


class InputWindow:
    """Limits the inputs that embedding and classification requests have in the engine's queue.

    Each running request gets an equal share, and at least one input.
    """

    def __init__(self, max_waiting: int | None) -> None:
        """Create the window. `max_waiting` is the size of the engine's queue; the window is at most half of
        this size.
        """
        self.num_in_flight = 0
        self._max_inputs = min(MAX_INPUTS_IN_FLIGHT, max(1, (max_waiting or 2 * MAX_INPUTS_IN_FLIGHT) // 2))
        self._num_requests = 0

    async def finish_all(self, generations: Sequence[RemoteGeneration]) -> None:
        """Run the generations of one request. If one generation fails, all other generations are aborted."""
        tasks, failures = set[asyncio.Task[Any]](), list[BaseException]()
        finished = asyncio.Event()

        def on_done(task: "asyncio.Task[Any]") -> None:
            self.num_in_flight -= 1
            tasks.remove(task)
            finished.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        async def wait_while(is_waiting: Callable[[], bool]) -> None:
            while is_waiting() and not failures:
                finished.clear()
                await finished.wait()
            if failures:
                raise failures[0]

        self._num_requests += 1
        try:
            for generation in generations:
                await wait_while(lambda: not self._has_capacity(len(tasks)))
                task = asyncio.create_task(finish_all([generation]))
                task.add_done_callback(on_done)
                tasks.add(task)
                self.num_in_flight += 1
            await wait_while(lambda: bool(tasks))
        finally:
            self._num_requests -= 1
            await cancel_all(list(tasks))

    def _has_capacity(self, num_running: int) -> bool:
        """Return True if a request with `num_running` inputs in the engine may add another input."""
        share = min(MAX_INPUTS_PER_REQUEST, self._max_inputs // self._num_requests)
        return num_running == 0 or (num_running < share and self.num_in_flight < self._max_inputs)


async def interleave(generations: Sequence[RemoteGeneration]) -> AsyncGenerator[tuple[int, list[TokenEvent]], None]:
    """Yield events as they arrive, with their generation's index. If one generation fails, all other generations are
    aborted.
    """
    if len(generations) == 1:
        async with aclosing(generations[0].stream()) as stream:
            async for events in stream:
                yield 0, events
        return
    queue: asyncio.Queue[_QueueItem] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_forward_events(index, generation, queue)) for index, generation in enumerate(generations)
    ]
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


async def _forward_events(index: int, generation: RemoteGeneration, queue: "asyncio.Queue[_QueueItem]") -> None:
    try:
        async with aclosing(generation.stream()) as stream:
            async for events in stream:
                queue.put_nowait((index, events))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def cancel_all(tasks: "Sequence[asyncio.Task[Any]]") -> None:
    """Cancel tasks and wait until they have finished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
