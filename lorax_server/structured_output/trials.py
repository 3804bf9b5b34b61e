"""Trials of grammars: each is compiled first in a process of its own.

That process may take `COMPILE_S` of CPU time and so much memory; what ends it there is refused, and hurts nobody. Its
parent, the keeper, is forked once from the process that follows structures, and forks the next one when it has ended:
to fork a process with a large vocabulary takes milliseconds, which masks and steps do not have.

One that gives way runs only while nobody else wants its core, so that the threads of a step come back to that core at
once. On a machine that is always busy it would never come to an end: then another one has to try, which has the
smallest share of a core that there is.
"""

import mmap
import os
import resource
import signal
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from lorax_server.machine import end_with_parent
from lorax_server.structured_output.matchers import Compiled, GrammarError
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tools.grammar import MAX_GRAMMAR

COMPILE_S = 0.25  # of CPU time
COMPILE_BYTES = 2**30  # beyond what this process has
MAX_BYTES = 8 * MAX_GRAMMAR  # of a grammar as it was made of a request's
NICENESS = 19  # of trials: steps go first
PAUSE_S = 0.5  # after one that has ended without a grammar
UNDER_WAY = MAX_BYTES  # the place after a grammar: 1 while it is tried
MAX_PROBLEM = 400  # characters
MAX_DESCRIPTORS = 4096
TOO_LONG = f"the grammar takes longer than {COMPILE_S:g} s to compile; make it smaller"
TOO_LARGE = "the grammar is too deep or too large to compile; make it smaller"


class Trier:
    """A process that tries grammars, one at a time, and its keeper."""

    def __init__(self, vocabulary: Vocabulary, *, gives_way: bool) -> None:
        self.gives_way = gives_way
        self.is_outrun = False  # another one has told of this grammar
        self.connection, theirs = Pipe()
        self._text = mmap.mmap(-1, MAX_BYTES + 1)  # where a grammar is read: nobody waits until it is
        self.grammar = ""  # that it is busy with
        self.began = 0.0
        self.is_lost = False
        self._keeper_id = os.fork()
        if self._keeper_id == 0:
            _keep(vocabulary, theirs, self._text, gives_way)
        with suppress(OSError):
            os.setpgid(self._keeper_id, self._keeper_id)  # to be ended with its child; the keeper may come to it later
        theirs.close()

    def begin(self, grammar: str) -> bool:
        """Have a grammar tried. Return false if it is too large for that."""
        text = grammar.encode(errors="surrogatepass")
        if len(text) > MAX_BYTES:
            return False
        self.grammar, self.began, self.is_outrun = grammar, time.monotonic(), False
        self._text[: len(text)] = text
        with suppress(OSError):  # of a keeper that is gone, which `hear` tells
            self.connection.send(len(text))
        return True

    def hear(self) -> str | None:
        """Return what is wrong with the grammar. If nobody is left to tell, this one `is_lost`."""
        self.grammar = ""
        try:
            problem: str | None = self.connection.recv()
        except (EOFError, OSError):
            self.end()
            return None
        return problem

    def end(self) -> None:
        """End the process and its keeper, if they have not ended by themselves."""
        self.grammar, self.is_lost = "", True
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses the first if all have ended
                kill(self._keeper_id, signal.SIGKILL)
        os.waitpid(self._keeper_id, 0)
        self.connection.close()
        self._text.close()


def _keep(vocabulary: Vocabulary, connection: Connection, text: mmap.mmap, gives_way: bool) -> None:
    """Keep a process that tries grammars, until nobody asks any more. Tell of a trial that has ended it."""
    try:
        os.setpgid(0, 0)
        end_with_parent()
        own = os.dup2(connection.fileno(), 3)
        os.closerange(4, MAX_DESCRIPTORS)  # or others would not notice the end of those who hold them too
        os.nice(NICENESS)
        words = Connection(own)
        while True:
            process_id = os.fork()
            if process_id == 0:
                end_with_parent()
                if gives_way and hasattr(os, "SCHED_IDLE"):  # of Linux
                    with suppress(OSError):
                        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                _try_all(vocabulary, words, text)
            _, status = os.waitpid(process_id, 0)
            if os.WIFEXITED(status):
                return
            if text[UNDER_WAY]:
                text[UNDER_WAY] = 0
                words.send(TOO_LONG if os.WTERMSIG(status) == signal.SIGPROF else TOO_LARGE)
            else:
                time.sleep(PAUSE_S)  # the system has no room for it
    finally:
        os._exit(0)


def _try_all(vocabulary: Vocabulary, connection: Connection, text: mmap.mmap) -> None:
    """Compile grammars, say how each went, and end when nobody asks any more."""
    try:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit = _data_bytes() + COMPILE_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        while True:
            length = connection.recv()
            text[UNDER_WAY] = 1
            grammar = text[:length].decode(errors="surrogatepass")
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # the signal ends the process
            problem = _try(vocabulary, grammar)
            text[UNDER_WAY] = 0
            connection.send(problem)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # of a trial that has gone wrong, which the keeper tells


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
