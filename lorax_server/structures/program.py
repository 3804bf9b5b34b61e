"""The process that follows structures of one vocabulary: compiles grammars, and computes the masks of answers.

A grammar is tried first in a child of this process, which may take `COMPILE_S` of CPU time and so much memory; what
ends it there is refused, and hurts nobody. What ends well is compiled here, on another thread, while masks go on.
"""

import os
import pickle
import queue
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
from cachetools import TTLCache

from lorax_server.errors import LoraxError
from lorax_server.structures import wire
from lorax_server.structures.matchers import Compiled, CompiledGrammars, Ending, Follower, GrammarError
from lorax_server.structures.vocabulary import Vocabulary, Words
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer

COMPILE_S = 0.25  # of CPU time
PATIENCE_S = 10.0  # for the same, on a busy machine
COMPILE_BYTES = 2**30  # beyond what this process has
NICENESS = 10  # of a child: steps go first
MAX_TRIERS = 2
MAX_PROBLEM = 400  # characters
MAX_DESCRIPTORS = 4096
REFUSED_S, MAX_REFUSED = 60.0, 1024
TOO_LONG = f"the grammar takes longer than {COMPILE_S:g} s to compile; make it smaller"
TOO_LARGE = "the grammar is too deep or too large to compile; make it smaller"


class _Trier:
    """A child that tries grammars, one at a time, for as long as it lives."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.connection, theirs = Pipe()
        self.grammar = ""  # that it is busy with
        self.began = 0.0
        self.process_id = os.fork()
        if self.process_id == 0:
            _try_all(vocabulary, theirs)
        theirs.close()

    def begin(self, grammar: str) -> None:
        self.grammar, self.began = grammar, time.monotonic()
        self.connection.send(grammar)

    def end(self) -> str:
        """End the child, if it has not ended by itself. Return the reason."""
        os.kill(self.process_id, signal.SIGKILL)
        _, status = os.waitpid(self.process_id, 0)
        self.connection.close()
        return TOO_LONG if os.WTERMSIG(status) == signal.SIGPROF else TOO_LARGE


class StructureProgram:
    """One thread reads messages and computes masks; another one compiles."""

    def __init__(self, connection: Connection, vocabulary: Vocabulary) -> None:
        self._connection = connection
        self._vocabulary = vocabulary
        self._grammars = CompiledGrammars()
        self._refused: TTLCache[str, str] = TTLCache(MAX_REFUSED, REFUSED_S)
        self._followers: dict[int, Follower] = {}
        self._waiting: dict[str, dict[int, wire.Begin]] = {}  # by grammar and request, in the order of arrival
        self._grammar_of: dict[int, str] = {}  # by request, of those that wait
        self._untried: list[str] = []
        self._triers: list[_Trier] = []
        self._num_compiling = 0
        self._to_compile: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[str, Compiled | str]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()

    def run(self) -> None:
        """Serve until the engine closes the connection."""
        self._triers.append(_Trier(self._vocabulary))  # before there are threads, and a request that waits for it
        threading.Thread(target=self._compile_all, daemon=True).start()
        while True:
            busy = {trier.connection: trier for trier in self._triers if trier.grammar}
            for ready in wait([self._connection, self._wake, *busy], PATIENCE_S / 10 if busy else None):
                if ready is self._connection:
                    self._read()
                elif ready == self._wake:
                    os.read(self._wake, 4096)
                    self._take_compiled()
                elif isinstance(ready, Connection):
                    self._hear(busy[ready])
            self._end_late()
            self._try_next()

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        message: wire.ToProgram = pickle.loads(self._connection.recv_bytes())
        match message:
            case wire.Begin():
                self._begin(message)
            case wire.Advance(tokens):
                self._advance(tokens)
            case wire.End(request_id):
                self._end(request_id)

    def _send(self, message: wire.FromProgram) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def _send_masks(self, masks: dict[int, Words]) -> None:
        if masks:
            self._send(wire.Masks(list(masks), np.stack(list(masks.values())).tobytes()))

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
        follower = self._followers[begin.request_id] = Follower(self._vocabulary, compiled, ending)
        self._send_masks({begin.request_id: follower.first_mask})

    def _advance(self, tokens: list[tuple[int, int]]) -> None:
        masks = {}
        for request_id, token_id in tokens:
            follower = self._followers.get(request_id)
            if follower is None:
                continue
            try:
                masks[request_id] = follower.consume(token_id)
            except GrammarError as error:
                del self._followers[request_id]
                self._send(wire.FailedAnswer(request_id, f"the answer cannot go on in this form: {error}"))
        self._send_masks(masks)

    # --- Trials -------------------------------------------------------------------------------------------------------

    def _try_next(self) -> None:
        """Hand out grammars. Fork not while the other thread compiles: a child would have its locks, and nobody to open
        them."""
        while self._untried:
            idle = next((trier for trier in self._triers if not trier.grammar), None)
            if idle is None:
                if self._num_compiling or len(self._triers) >= MAX_TRIERS:
                    return
                idle = _Trier(self._vocabulary)
                self._triers.append(idle)
            idle.begin(self._untried.pop(0))

    def _hear(self, trier: _Trier) -> None:
        grammar = trier.grammar
        try:
            problem: str | None = trier.connection.recv()
        except (EOFError, OSError):
            self._triers.remove(trier)
            self._refuse(grammar, trier.end())
            return
        trier.grammar = ""
        if problem is not None:
            self._refuse(grammar, problem)
        else:
            self._num_compiling += 1
            self._to_compile.put(grammar)

    def _end_late(self) -> None:
        now = time.monotonic()
        for trier in [each for each in self._triers if each.grammar and now - each.began > PATIENCE_S]:
            self._triers.remove(trier)
            trier.end()
            for begin in self._take_waiting(trier.grammar):
                self._send(
                    wire.FailedAnswer(begin.request_id, "the machine is too busy to compile a grammar", is_busy=True)
                )

    def _refuse(self, grammar: str, message: str) -> None:
        self._refused[grammar] = message
        for begin in self._take_waiting(grammar):
            self._send(wire.FailedAnswer(begin.request_id, message))

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def _compile_all(self) -> None:
        while True:
            grammar = self._to_compile.get()
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


def _try_all(vocabulary: Vocabulary, connection: Connection) -> None:
    """Compile grammars in this child, say how each went, and end when nobody asks any more."""
    try:
        own = os.dup2(connection.fileno(), 3)
        os.closerange(4, MAX_DESCRIPTORS)  # or others would not notice the end of those who hold them too
        os.nice(NICENESS)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit = _data_bytes() + COMPILE_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        words = Connection(own)
        while True:
            grammar = words.recv()
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # the signal ends the process
            words.send(_try(vocabulary, grammar))
    finally:
        os._exit(0)


def _try(vocabulary: Vocabulary, grammar: str) -> str | None:
    """Return what is wrong with a grammar."""
    try:
        Compiled.of(vocabulary, grammar)
    except GrammarError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _data_bytes() -> int:
    """Return the memory that this process has taken and RLIMIT_DATA counts; 0 where that cannot be read."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    except (OSError, StopIteration, ValueError):
        return 2**40


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the engine ends this process itself
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError):
        try:
            vocabulary = Vocabulary(_load(wire.Start(*pickle.loads(connection.recv_bytes()))))
        except LoraxError as error:
            connection.send_bytes(pickle.dumps(wire.Unusable(str(error))))
            return
        StructureProgram(connection, vocabulary).run()


if __name__ == "__main__":
    main()
