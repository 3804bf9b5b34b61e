"""Trials of grammars: each is compiled first in a child of the process that follows structures.

The child may take `COMPILE_S` of CPU time and so much memory; what ends it there is refused, and hurts nobody.
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

from lorax_server.structures.matchers import Compiled, GrammarError
from lorax_server.structures.vocabulary import Vocabulary
from lorax_server.text.tools.grammar import MAX_GRAMMAR

COMPILE_S = 0.25  # of CPU time
COMPILE_BYTES = 2**30  # beyond what this process has
MAX_BYTES = 8 * MAX_GRAMMAR  # of a grammar as it was made of a request's
NICENESS = 19  # of a child: steps go first
MAX_PROBLEM = 400  # characters
MAX_DESCRIPTORS = 4096
TOO_LONG = f"the grammar takes longer than {COMPILE_S:g} s to compile; make it smaller"
TOO_LARGE = "the grammar is too deep or too large to compile; make it smaller"


class Trier:
    """A child that tries grammars, one at a time, for as long as it lives."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.connection, theirs = Pipe()
        self._text = mmap.mmap(-1, MAX_BYTES)  # where the child reads a grammar: nobody waits until it does
        self.grammar = ""  # that it is busy with
        self.began = 0.0
        self.process_id = os.fork()
        if self.process_id == 0:
            _try_all(vocabulary, theirs, self._text)
        theirs.close()

    def begin(self, grammar: str) -> bool:
        """Hand a grammar to the child. Return false if it is too large for that."""
        text = grammar.encode(errors="surrogatepass")
        if len(text) > MAX_BYTES:
            return False
        self.grammar, self.began = grammar, time.monotonic()
        self._text[: len(text)] = text
        self.connection.send(len(text))
        return True

    def end(self) -> str:
        """End the child, if it has not ended by itself. Return the reason."""
        os.kill(self.process_id, signal.SIGKILL)
        _, status = os.waitpid(self.process_id, 0)
        self.connection.close()
        self._text.close()
        return TOO_LONG if os.WTERMSIG(status) == signal.SIGPROF else TOO_LARGE


def _try_all(vocabulary: Vocabulary, connection: Connection, text: mmap.mmap) -> None:
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
            grammar = text[: words.recv()].decode(errors="surrogatepass")
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
