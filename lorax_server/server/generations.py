"""Requests to the engine that make up one answer, and what becomes of them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import LoraxError
from lorax_server.generation.answer import Answer
from lorax_server.generation.completion import Chunk, Completion, Run
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Request, Started


class Job:
    """One request to the engine: a prompt, and one answer to it."""

    def __init__(self, engine: EngineClient, request: Request, tokenizer: TextTokenizer) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.started: Started | None = None
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self.chunks_so_far: list[Chunk] = []
        self._engine = engine
        self._run = Run(request, Answer(tokenizer.detokenizer, request.prompt_ids, request.stop))

    @property
    def completion(self) -> Completion:
        return self._run.completion

    @property
    def text(self) -> str:
        """All that was shown so far."""
        return self._run.answer.text

    @property
    def seed(self) -> int | None:
        """What the answer was drawn with, if it was."""
        sampling = self.request.sampling
        return None if sampling.is_greedy else sampling.seed

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """What the engine adds, as it comes. Who stops reading ends the request."""
        self.sent_at = time.monotonic()
        async with aclosing(self._engine.stream(self.request)) as stream:
            async for outputs in stream:
                if self.first_at is None:
                    self.first_at, self.started = time.monotonic(), outputs[0].started
                for output in outputs:
                    if not self._run.is_done:  # a stop string, which the engine does not see, may have ended it
                        self._run.take(output)
                chunks, self._run.chunks = self._run.chunks, []
                yield chunks
                if self._run.is_done:
                    return

    async def finish(self) -> Completion:
        """All of it; what each token added is then in `chunks_so_far`."""
        async with aclosing(self.chunks()) as stream:
            async for chunks in stream:
                self.chunks_so_far += chunks
        return self.completion

    def stop(self, error: LoraxError) -> None:
        """End it from outside; who reads it gets the error."""
        self._engine.abort(self.request.request_id, error)


def count_cached(jobs: Sequence[Job]) -> int:
    """Tokens of prompts that did not have to be computed; of a prompt with several answers only once."""
    by_prompt: dict[int, int] = {}  # all answers to a prompt share its list of tokens
    for job in jobs:
        cached = 0 if job.started is None else job.started.cached_tokens
        by_prompt[id(job.request.prompt_ids)] = max(cached, by_prompt.get(id(job.request.prompt_ids), 0))
    return sum(by_prompt.values())


async def finish_all(jobs: Sequence[Job]) -> list[Completion]:
    """All together; the first that fails ends the others."""
    tasks = [asyncio.create_task(job.finish()) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def interleave(jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """What all of them add, by their place, in the order in which it comes. The first that fails ends the others."""
    if len(jobs) == 1:
        async with aclosing(jobs[0].chunks()) as chunks:
            async for some in chunks:
                yield 0, some
        return
    queue: asyncio.Queue[tuple[int, list[Chunk]] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(place, job, queue)) for place, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            match await queue.get():
                case None:
                    left -= 1
                case BaseException() as error:
                    raise error
                case item:
                    yield item
    finally:
        await _cancel(tasks)


async def _feed(place: int, job: Job, queue: "asyncio.Queue[tuple[int, list[Chunk]] | BaseException | None]") -> None:
    try:
        async with aclosing(job.chunks()) as chunks:
            async for some in chunks:
                queue.put_nowait((place, some))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def _cancel(tasks: "Sequence[asyncio.Task[object]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
