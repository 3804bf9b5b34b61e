"""The process that follows structures of one vocabulary: compiles grammars, and computes the masks of answers.

A grammar is tried first in a process of its own (`trials.py`). What ends well is compiled here, on another thread,
while masks go on.
"""

import os
import pickle
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from cachetools import TTLCache

from lorax_server.errors import LoraxError
from lorax_server.machine import shorten_turns
from lorax_server.structured_output import wire
from lorax_server.structured_output.matchers import (
    MAX_FORCED,
    Compiled,
    CompiledGrammars,
    Ending,
    Follower,
    GrammarError,
)
from lorax_server.structured_output.slots import WrittenSlots
from lorax_server.structured_output.trials import MAX_PROBLEM, NICENESS, TOO_LARGE, Trier
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer

PATIENCE_S = 30.0  # for a trial, on a machine so busy that the lowest priority has little of it
GIVE_WAY_S = 0.5  # for a trial that gives way to all others, until another one begins
JUMP_S = 0.003  # of CPU time: for tokens that are taken ahead at once; steps run on the same cores
REFUSED_S, MAX_REFUSED = 60.0, 1024
Result = tuple[int, GrammarError | None]  # of a request: what is wrong, if its mask is not there


class Jump(NamedTuple):
    """An answer on its way through tokens that are forced."""

    forced: list[int]  # that were taken
    token_id: int  # the only one that may come after them
    until_s: float  # of the time that the answer's masks take: then it goes on later


class StructureProgram:
    """One thread reads messages and computes masks, and another one compiles."""

    def __init__(self, connection: Connection, vocabulary: Vocabulary, slots: WrittenSlots) -> None:
        self._connection = connection
        self._unread = select.poll()
        self._unread.register(connection.fileno(), select.POLLIN)
        self._slots = slots
        self._vocabulary = vocabulary
        self._grammars = CompiledGrammars()
        self._refused: TTLCache[str, str] = TTLCache(MAX_REFUSED, REFUSED_S)
        self._followers: dict[int, Follower] = {}
        self._jumping: dict[int, Jump] = {}
        self._waiting: dict[str, dict[int, wire.Begin]] = {}  # by grammar and request, in the order of arrival
        self._grammar_of: dict[int, str] = {}  # by request, of those that wait
        self._untried: list[str] = []
        self._triers: list[Trier] = []
        self._num_compiling = 0
        self._to_compile: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[str, Compiled | str]] = queue.SimpleQueue()
        self._came_at = 0.0  # when the last message came
        self._wake, self._waker = os.pipe()

    def run(self) -> None:
        """Serve until the engine closes the connection."""
        self._send(wire.SlotsMade(self._vocabulary.num_words))
        self._triers = [Trier(self._vocabulary, gives_way=way) for way in (True, False)]  # before there are threads
        threading.Thread(target=self._compile_all, daemon=True).start()
        while True:
            triers = {trier.connection: trier for trier in self._triers if not trier.is_lost}
            is_trying = any(trier.grammar for trier in self._triers)
            patience_s = 0 if self._jumping else GIVE_WAY_S / 2 if is_trying else None
            for ready in wait([self._connection, self._wake, *triers], patience_s):
                if ready is self._connection:
                    self._read()
                elif ready == self._wake:
                    os.read(self._wake, 4096)
                    self._take_compiled()
                elif isinstance(ready, Connection):
                    self._hear(triers[ready])
            self._jump()
            self._look_at_late()
            self._try_next()

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read all messages that are there. Tokens of several are taken together, so that late answers catch up."""
        tokens = dict[int, int]()
        self._came_at = time.monotonic()
        while True:
            message: wire.ToProgram = pickle.loads(self._connection.recv_bytes())
            match message:
                case wire.Begin():
                    self._advance(tokens.items())  # answers that run do not wait for others to begin
                    tokens.clear()
                    self._begin(message)
                case wire.Advance(chosen):
                    tokens.update(chosen)
                case wire.End(request_id, slot):
                    tokens.pop(request_id, None)
                    self._end(request_id)
                    self._slots.give_back(slot)
            if not self._unread.poll(0):
                break
        self._advance(tokens.items())

    def _send(self, message: wire.FromProgram) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def _send_masks(self, request_ids: list[int], forced: dict[int, list[int]]) -> None:
        if request_ids:
            self._send(wire.Masks(request_ids, forced, time.monotonic() - self._came_at))

    def _begin(self, begin: wire.Begin) -> None:
        compiled, refusal = self._grammars.get(begin.grammar), self._refused.get(begin.grammar)
        if compiled is not None:
            self._follow(begin, compiled)
        elif refusal is not None:
            self._send(wire.FailedAnswer(begin.request_id, refusal))
        else:
            if begin.grammar not in self._waiting:
                self._untried.append(begin.grammar)
            self._waiting.setdefault(begin.grammar, {})[begin.request_id] = begin
            self._grammar_of[begin.request_id] = begin.grammar

    def _end(self, request_id: int) -> None:
        self._followers.pop(request_id, None)
        self._jumping.pop(request_id, None)
        grammar = self._grammar_of.pop(request_id, None)
        if grammar is None:
            return
        del self._waiting[grammar][request_id]
        if not self._waiting[grammar] and grammar in self._untried:  # what is being tried is known to others soon
            self._untried.remove(grammar)
            del self._waiting[grammar]

    def _take_waiting(self, grammar: str) -> list[wire.Begin]:
        waiting = self._waiting.pop(grammar)
        for request_id in waiting:
            del self._grammar_of[request_id]
        return list(waiting.values())

    def _follow(self, begin: wire.Begin, compiled: Compiled) -> None:
        if not any(token_id < self._vocabulary.num_ids for token_id in begin.eos):
            self._send(wire.FailedAnswer(begin.request_id, "the model has no token that ends an answer"))
            return
        ending = Ending(begin.eos, begin.stop_tokens, begin.min_new_tokens)
        self._slots.take(begin.slot)
        follower = Follower(self._vocabulary, compiled, ending, self._slots.masks, begin.slot, begin.jump_below)
        self._followers[begin.request_id] = follower
        self._send_masks([begin.request_id], {})

    def _advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Take tokens, at last those of grammars that take long: others do not wait for these."""
        groups: tuple[list[tuple[int, int]], ...] = [], []
        for request_id, token_id in tokens:
            follower = self._followers.get(request_id)
            if follower is not None:
                groups[follower.is_slow].append((request_id, token_id))
        for some in groups:
            self._answer(self._consume(some))

    def _jump(self) -> None:
        """Take one forced token of each answer that has one. Masks that others wait for come between two of these."""
        self._advance([(request_id, jump.token_id) for request_id, jump in self._jumping.items()])

    def _answer(self, results: Sequence[Result]) -> None:
        """Tell of masks, but for those that leave no choice: these answers jump."""
        forced = dict[int, list[int]]()
        for request_id, error in results:
            follower, jump = self._followers[request_id], self._jumping.pop(request_id, None)
            if error is None:
                taken = [] if jump is None else [*jump.forced, jump.token_id]
                until_s = follower.spent_s + JUMP_S if jump is None else jump.until_s
                may_go_on = len(taken) < MAX_FORCED and follower.spent_s <= until_s
                token_id = follower.find_forced() if may_go_on else None
                if token_id is None:
                    forced[request_id] = taken
                else:
                    self._jumping[request_id] = Jump(taken, token_id, until_s)
            elif jump is not None:
                follower.fail_after(jump.token_id, error)  # if it gets there
                forced[request_id] = jump.forced
            else:
                del self._followers[request_id]
                self._send(wire.FailedAnswer(request_id, f"the answer cannot go on in this form: {error}"))
        self._send_masks(list(forced), {request_id: taken for request_id, taken in forced.items() if taken})

    def _consume(self, tokens: Sequence[tuple[int, int]]) -> list[Result]:
        results: list[Result] = []
        for request_id, token_id in tokens:
            try:
                self._followers[request_id].consume(token_id)
                results.append((request_id, None))
            except GrammarError as error:
                results.append((request_id, error))
        return results

    # --- Trials -------------------------------------------------------------------------------------------------------

    def _try_next(self) -> None:
        """Hand out grammars, first to the trier that gives way to others."""
        while self._untried:
            idle = self._find_idle() or self._replace_lost()
            if idle is None:
                break
            grammar = self._untried.pop(0)
            if not idle.begin(grammar):
                self._refuse(grammar, TOO_LARGE)
        if all(trier.is_lost for trier in self._triers) and not self._num_compiling:
            while self._untried:  # there is no room for another process
                self._give_up(self._untried.pop(0))

    def _find_idle(self) -> Trier | None:
        return next((trier for trier in self._triers if not (trier.grammar or trier.is_lost)), None)

    def _replace_lost(self) -> Trier | None:
        """Put another trier in the place of one that was killed. Fork not while the other thread compiles: a child
        would have its locks, and nobody to open them."""
        for number, trier in enumerate(self._triers):
            if trier.is_lost and not self._num_compiling:
                with suppress(OSError):
                    self._triers[number] = Trier(self._vocabulary, gives_way=trier.gives_way)
                    return self._triers[number]
        return None

    def _hear(self, trier: Trier) -> None:
        """Take the result of a trial. Of two trials of one grammar the first result counts."""
        grammar, is_outrun = trier.grammar, trier.is_outrun
        problem = trier.hear()
        others = self._find_trying(grammar)
        if is_outrun or not grammar or (trier.is_lost and others):
            return
        for other in others:
            other.is_outrun = True
        if trier.is_lost:
            self._give_up(grammar)
        elif problem is not None:
            self._refuse(grammar, problem)
        else:
            self._num_compiling += 1
            self._to_compile.put(grammar)

    def _find_trying(self, grammar: str) -> list[Trier]:
        """Return the triers whose result of a grammar would count."""
        return [trier for trier in self._triers if trier.grammar == grammar and not trier.is_outrun]

    def _look_at_late(self) -> None:
        """Have a grammar tried by another trier as well, where one had to give way for too long. Give up those that
        take longer than `PATIENCE_S`."""
        now = time.monotonic()
        for trier in [each for each in self._triers if each.grammar and not each.is_outrun]:
            idle, is_alone = self._find_idle(), len(self._find_trying(trier.grammar)) == 1
            if now - trier.began > PATIENCE_S:
                if is_alone:
                    self._give_up(trier.grammar)
                trier.end()
            elif trier.gives_way and is_alone and now - trier.began > GIVE_WAY_S and idle is not None:
                idle.begin(trier.grammar)

    def _give_up(self, grammar: str) -> None:
        """Say that a grammar could not be tried, and that it is not to blame."""
        for begin in self._take_waiting(grammar):
            message = "the machine is too busy to compile a grammar; try again"
            self._send(wire.FailedAnswer(begin.request_id, message, is_busy=True))

    def _refuse(self, grammar: str, message: str) -> None:
        self._refused[grammar] = message
        for begin in self._take_waiting(grammar):
            self._send(wire.FailedAnswer(begin.request_id, message))

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def _compile_all(self) -> None:
        with suppress(OSError):  # only Linux has priorities of threads: steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (grammar := self._to_compile.get()) is not None:
            result: Compiled | str
            try:
                result = Compiled.of(self._vocabulary, grammar)
            except GrammarError as error:
                result = str(error)
            except BaseException as error:  # the library's panics are no Exceptions; without this thread all would wait
                result = f"{type(error).__name__}: {error}"[:MAX_PROBLEM]
            self._compiled.put((grammar, result))
            os.write(self._waker, b".")

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            grammar, result = self._compiled.get()
            self._num_compiling -= 1
            if isinstance(result, str):
                self._refuse(grammar, result)
                continue
            self._grammars[grammar] = result
            for begin in self._take_waiting(grammar):
                self._follow(begin, result)


def _load(start: wire.Start) -> TextTokenizer:
    folder = Path(start.model)
    base = load_tokenizer(folder)
    if start.adapter is None:
        return base
    tokenizers = AdapterTokenizers(base, folder)
    try:
        return tokenizers.find(start.adapter)
    finally:
        tokenizers.close()


def main() -> None:
    shorten_turns()  # masks do not wait for the thread that compiles
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the engine ends this process itself
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    with suppress(EOFError, ConnectionError):
        try:
            start: wire.Start = pickle.loads(connection.recv_bytes())
            vocabulary = Vocabulary(_load(start))
        except LoraxError as error:
            connection.send_bytes(pickle.dumps(wire.Unusable(str(error))))
            return
        slots = WrittenSlots.open(memory, vocabulary.num_words_and_end)
        StructureProgram(connection, vocabulary, slots).run()


if __name__ == "__main__":
    main()
