"""Structures of the engine's requests: which of them wait, and the tokens that each may choose next."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from lorax_server.errors import BusyError, EngineError, InputError, LoraxError
from lorax_server.machine import count_cores
from lorax_server.structured_output import wire
from lorax_server.structured_output.process import StructureProcess
from lorax_server.structured_output.slots import Words
from lorax_server.types import Request, Resolved

logger = logging.getLogger(__name__)
MAX_VOCABULARIES = 8  # at once: each has a process, the base model's may have several
MAX_PROCESSES = 4  # of a vocabulary
MANY = 8  # answers of each process after which another one is started
CALM_S = 60.0  # after one has ended or could not be started, until another one is started beside others
KNOWN = 4  # answers that a process may have more than others, and be chosen for a grammar that it knows
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


def find_num_processes(device: str) -> int:
    """Return how many processes may compute the masks of the base model's vocabulary: fewer on a CPU, where the model
    computes meanwhile with the same cores.

    Each has one thread. Several threads of one process, as llguidance has them, took longer than one: to wake them
    takes as long as most masks, and those of one grammar wait for each other.
    """
    return max(1, min(MAX_PROCESSES, count_cores() // (8 if device == "cpu" else 4)))


class Structures:
    """Hands answers to processes, which have one vocabulary each, and collects their masks. Belongs to the engine's
    thread."""

    def __init__(self, model: Path, num_processes: int = 1) -> None:
        """Up to `num_processes` share the answers with the base model's vocabulary; those of adapters have one each."""
        self.on_news: Callable[[], None] = lambda: None  # called, on any thread, when `take_settled` has something
        self._num_processes = num_processes
        self.jumps = True  # whether several forced tokens come at once
        self._model = model
        self._processes: dict[_Key, list[StructureProcess]] = {}  # those used last at the end
        self._calm_until = 0.0
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
        grammar = request.structure.grammar
        process = self._find_process(request.adapter, grammar)
        slot = process.slot_of[request.request_id] = process.slots.take()
        self._of_request[request.request_id] = process
        eos, others = tuple(sorted(stop.eos_token_ids)), tuple(sorted(stop.stop_token_ids))
        if not self.jumps or request.sampling.raw_logprobs or request.sampling.num_alternatives:
            jump_below = 0
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

    def gather(
        self,
        request_ids: Collection[int],
        patience_s: float,
        alone_s: float = 0.0,
        step_s: float = math.inf,
        num_others: int = 0,
    ) -> dict[int, Next]:
        """Return what comes next in these requests, of those where it is known within so many seconds.

        Wait only as long as that costs those who could choose, `num_others` among them, less than the late ones lose:
        a step each. While nobody could choose, wait for `alone_s`, if that is longer.
        """
        began = time.monotonic()
        with self._changed:
            while num_late := sum(each not in self._next for each in request_ids):
                num_able = num_others + len(request_ids) - num_late
                wait_s = min(patience_s, step_s * num_late / num_able) if num_able else max(patience_s, alone_s)
                left_s = began + wait_s - time.monotonic()
                self._end_hanging()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, HANG_S))
            found = {each: self._next.get(each) for each in request_ids}
        return {request_id: following for request_id, following in found.items() if following is not None}

    def close(self) -> None:
        for process in chain(*self._processes.values()):
            process.close()
        self._processes.clear()
        self._of_request.clear()
        self._next.clear()  # masks, which hold the memory of processes

    def _find_process(self, adapter: Resolved | None, grammar: str) -> StructureProcess:
        """Return the process with the fewest answers, or one with a few more that knows the grammar already."""
        key: _Key = (None, (), ())
        if adapter is not None:
            key = adapter.folder, tuple(adapter.tokenizer_files), tuple(map(tuple, adapter.tokenizer_stamps))
        found = self._find_processes(key, adapter)
        digest = hash(grammar)
        started = [process for process in found if process.slots.is_open] or found
        chosen = min(started, key=lambda process: len(process.slot_of) - KNOWN * (digest in process.known))
        chosen.known[digest] = True
        return chosen

    def _find_processes(self, key: _Key, adapter: Resolved | None) -> list[StructureProcess]:
        """Return the processes of a vocabulary, of which the last one may just start. Raise if it cannot be used."""
        found = self._processes.pop(key, [])
        self._processes[key] = found  # the last now, and known whatever happens below
        alive = [each for each in found if not each.is_gone]
        unusable = next((each for each in found if time.monotonic() < each.unusable_until), None)
        if unusable is not None and not alive:
            raise InputError(unusable.problem)
        for process in set(found) - set(alive):
            found.remove(process)
            process.close()
            self._calm_until = time.monotonic() + CALM_S
        if not found:
            del self._processes[key]
            self._make_room()
            self._processes[key] = found
        most, num_answers = self._num_processes if adapter is None else 1, sum(len(each.slot_of) for each in found)
        may_start = len(found) < most and num_answers >= MANY * len(found) and time.monotonic() >= self._calm_until
        if not found or may_start:
            self._start(found, adapter)
        return found

    def _start(self, found: list[StructureProcess], adapter: Resolved | None) -> None:
        try:
            found.append(StructureProcess(wire.Start(str(self._model), adapter), self._take))
        except (OSError, RuntimeError) as error:  # the machine has no room for another process, or for its threads
            if not found:
                raise BusyError(f"a process that follows structures cannot be started: {error}; try again") from error
            logger.warning("Masks have no further process: %s", error)
            self._calm_until = time.monotonic() + CALM_S

    def _make_room(self) -> None:
        idle = [key for key, processes in self._processes.items() if not any(each.slot_of for each in processes)]
        if len(self._processes) >= MAX_VOCABULARIES:
            if not idle:
                raise BusyError(f"answers of {MAX_VOCABULARIES} vocabularies have structures now; try again")
            for process in self._processes.pop(idle[0]):
                process.close()

    def _end_hanging(self) -> None:
        now = time.monotonic()
        for process in chain(*self._processes.values()):
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
