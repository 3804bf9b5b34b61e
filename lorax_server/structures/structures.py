"""Structures of the engine's requests: which of them wait, and the tokens that each may choose next."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from lorax_server.errors import BusyError, EngineError, InputError, LoraxError
from lorax_server.machine import count_cores
from lorax_server.structures import wire
from lorax_server.structures.process import StructureProcess
from lorax_server.structures.slots import Words
from lorax_server.types import Request, Resolved

logger = logging.getLogger(__name__)
MAX_PROCESSES = 8  # vocabularies: each has a process
MAX_THREADS = 8  # of a process: with 12 the masks of 64 answers took as long, that of the dearest one of them
HANG_S = 30.0  # without a mask: the process is ended
UNUSABLE_S = 60.0  # for which a vocabulary that cannot be used is refused at once
_Key = tuple[str | None, tuple[str, ...], tuple[tuple[int, ...], ...]]


class Next(NamedTuple):
    """The next tokens of an answer: those that are forced, and the mask of the one after."""

    words: Words  # the mask, as the process has written it
    forced: list[int]  # come in any case


class Settled(NamedTuple):
    """A request whose first mask is there, or one that fails."""

    request_id: int
    error: LoraxError | None = None


def find_num_threads(device: str) -> int:
    """Return the threads for masks: fewer on a CPU, where the model computes meanwhile with the same cores."""
    return max(1, min(MAX_THREADS, count_cores() // (4 if device == "cpu" else 2)))


class Structures:
    """Hands answers to processes, one for each vocabulary, and collects their masks. Belongs to the engine's thread."""

    def __init__(self, model: Path, num_threads: int = 1) -> None:
        """`num_threads` compute the masks of a vocabulary."""
        self.on_news: Callable[[], None] = lambda: None  # called, on any thread, when `take_settled` has something
        self._num_threads = num_threads
        self.jumps = True  # whether several forced tokens come at once
        self._model = model
        self._processes: dict[_Key, StructureProcess] = {}  # the one used last at the end
        self._of_request: dict[int, StructureProcess] = {}
        self._changed = threading.Condition()  # guards the next three, which reading threads change
        self._next: dict[int, Next | None] = {}  # None: there will be none
        self._begun: set[int] = set()
        self._settled: deque[Settled] = deque()

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of_request

    @property
    def has_news(self) -> bool:
        return bool(self._settled)

    def begin(self, request: Request, jump_below: int = 0) -> None:
        """Have a request's structure compiled; `take_settled` tells when it can begin. Raise if it cannot be.

        Forced tokens with ids below `jump_below` may come several at once, if the request does not ask how likely they
        were without the mask: with it, it is sure.
        """
        assert request.structure is not None
        stop = request.stop
        if stop.ignore_eos:
            raise InputError("`ignore_eos_token` cannot be used here: an answer with a structure ends where that does")
        if not stop.eos_token_ids:
            raise InputError("structured output needs a model with a token that ends answers")
        process = self._find_process(request.adapter)
        slot = process.slot_of[request.request_id] = process.slots.take()
        self._of_request[request.request_id] = process
        eos, others = tuple(sorted(stop.eos_token_ids)), tuple(sorted(stop.stop_token_ids))
        if not self.jumps or request.sampling.raw_logprobs or request.sampling.num_alternatives:
            jump_below = 0
        grammar = request.structure.grammar
        process.send(wire.Begin(request.request_id, slot, grammar, eos, others, stop.min_new_tokens, jump_below))
        if process.is_gone:  # since a moment ago
            self._take(process, None)

    def take_settled(self) -> list[Settled]:
        settled = []
        while self._settled:
            settled.append(self._settled.popleft())
        return [each for each in settled if each.request_id in self._of_request]

    def advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Note the tokens that were chosen, by request: the masks of the next ones are computed meanwhile.

        The masks after forced tokens are there already.
        """
        parts: dict[StructureProcess, list[tuple[int, int]]] = {}
        with self._changed:
            now = time.monotonic()
            for request_id, token_id in tokens:
                following = self._next.get(request_id)
                if following is None:
                    continue  # it has failed
                process = self._of_request[request_id]
                if not following.forced:
                    del self._next[request_id]
                    process.asked_at[request_id] = now
                    parts.setdefault(process, []).append((request_id, token_id))
                elif (expected := following.forced.pop(0)) != token_id:
                    error = EngineError(f"token {token_id} was chosen, where {expected} was forced by the structure")
                    logger.error("Request %d fails: %s", request_id, error)
                    self._fail(process, request_id, error)
        for process, part in parts.items():
            process.send(wire.Advance(part))

    def end(self, request_id: int) -> None:
        """Forget a request, in whatever state it is."""
        process = self._of_request.pop(request_id, None)
        if process is not None:
            process.send(wire.End(request_id, process.slot_of[request_id]))
            with self._changed:
                process.slots.give_back(process.slot_of.pop(request_id))
                process.asked_at.pop(request_id, None)
                self._next.pop(request_id, None)
                self._begun.discard(request_id)

    def gather(self, request_ids: Collection[int], patience_s: float, alone_s: float = 0.0) -> dict[int, Next]:
        """Return what comes next in these requests, of those where it is known within so many seconds.

        While it is not known of any, wait for `alone_s`, if that is longer.
        """
        began = time.monotonic()
        with self._changed:
            while any(each not in self._next for each in request_ids):
                is_alone = not any(each in self._next for each in request_ids)
                left_s = began + (max(patience_s, alone_s) if is_alone else patience_s) - time.monotonic()
                self._end_hanging()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, HANG_S))
            found = {each: self._next.get(each) for each in request_ids}
        return {request_id: following for request_id, following in found.items() if following is not None}

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._of_request.clear()
        self._next.clear()  # masks, which hold the memory of processes

    def _find_process(self, adapter: Resolved | None) -> StructureProcess:
        key: _Key = (None, (), ())
        if adapter is not None:
            key = adapter.folder, tuple(adapter.tokenizer_files), tuple(map(tuple, adapter.tokenizer_stamps))
        process = self._processes.pop(key, None)
        if process is not None and process.is_gone:
            if time.monotonic() < process.unusable_until:
                self._processes[key] = process
                raise InputError(process.problem)
            process.close()
            process = None
        if process is None:
            self._make_room()
            process = StructureProcess(wire.Start(str(self._model), adapter, self._num_threads), self._take)
        self._processes[key] = process
        return process

    def _make_room(self) -> None:
        idle = [key for key, process in self._processes.items() if not process.slot_of]
        if len(self._processes) >= MAX_PROCESSES:
            if not idle:
                raise BusyError(f"answers of {MAX_PROCESSES} vocabularies have structures now; try again")
            self._processes.pop(idle[0]).close()

    def _end_hanging(self) -> None:
        now = time.monotonic()
        for process in self._processes.values():
            if now - next(iter(process.asked_at.values()), now) > HANG_S:
                process.kill()  # its reader notices

    def _take(self, process: StructureProcess, message: wire.FromProgram | None) -> None:
        """Take a message of a process, on its thread."""
        with self._changed:
            match message:
                case wire.SlotsMade(num_words):
                    process.slots.open(num_words)
                case wire.Masks():
                    self._take_masks(process, message)
                case wire.FailedAnswer(request_id, text, is_busy):
                    self._fail(process, request_id, BusyError(text) if is_busy else InputError(text))
                case wire.Unusable(text):
                    process.problem, process.unusable_until = text, time.monotonic() + UNUSABLE_S
                    self._fail_all(process, InputError(text))
                case None:
                    self._fail_all(process, BusyError("the process that follows structures has ended; try again"))
            has_news = bool(self._settled)
            self._changed.notify_all()
        if has_news:
            self.on_news()

    def _take_masks(self, process: StructureProcess, masks: wire.Masks) -> None:
        for request_id in masks.request_ids:
            slot = process.slot_of.get(request_id)
            if slot is None:
                continue  # it has ended meanwhile
            process.asked_at.pop(request_id, None)
            self._next[request_id] = Next(process.slots.read(slot), masks.forced.get(request_id, []))
            if request_id not in self._begun:
                self._begun.add(request_id)
                self._settled.append(Settled(request_id))

    def _fail(self, process: StructureProcess, request_id: int, error: LoraxError) -> None:
        if request_id not in process.slot_of:
            return  # it has ended meanwhile
        process.asked_at.pop(request_id, None)
        self._next[request_id] = None
        self._settled.append(Settled(request_id, error))

    def _fail_all(self, process: StructureProcess, error: LoraxError) -> None:
        for request_id in list(process.slot_of):
            self._fail(process, request_id, error)
