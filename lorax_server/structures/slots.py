"""Masks in memory that the engine shares with a process that follows structures: each answer has a slot.

The process writes the mask of an answer into its slot, and then tells the engine. It writes the next one when the
engine has told it the token that was chosen, and so does not need the mask any more. The memory is a file without a
name, and is gone with the last process that has it open, however that ends.
"""

import heapq
import mmap
import os
import tempfile
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from lorax_server.errors import BusyError

Words = npt.NDArray[np.int32]  # of a mask: a bit for each token, the first the lowest
MAX_SLOTS = 2**14  # answers of a vocabulary at once, also those that wait; only slots that were used take memory


class MaskSlots:
    """The engine's side. Its thread takes slots, the lowest first, and gives them back; the thread that hears of masks
    opens and reads them."""

    def __init__(self) -> None:
        self.file = _make_file()
        self._free = list(range(MAX_SLOTS))  # a heap
        self._masks: Words | None = None

    def take(self) -> int:
        if not self._free:
            raise BusyError(f"{MAX_SLOTS} answers have structures now; try again")
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def open(self, num_words: int) -> None:
        """Open the memory, now that the process knows how long masks are."""
        masks = np.frombuffer(mmap.mmap(self.file, 0, access=mmap.ACCESS_READ), np.int32)
        self._masks = masks.reshape(MAX_SLOTS, -1)[:, :num_words]

    def read(self, slot: int) -> Words:
        """Return a slot's mask, which is the answer's next one until another token is chosen."""
        assert self._masks is not None, "the process has not told how long masks are"
        mask: Words = self._masks[slot]
        return mask

    def close(self) -> None:
        """Let go of the memory; it goes with the last mask that somebody holds."""
        os.close(self.file)
        self._masks = None


def write_slots(file: int, row_words: int) -> Words:
    """Return the memory of all slots in the process that writes them: [slots, words]."""
    os.ftruncate(file, MAX_SLOTS * row_words * 4)
    return np.frombuffer(mmap.mmap(file, 0), np.int32).reshape(MAX_SLOTS, row_words)


def _make_file() -> int:
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # some sandboxes do not have it
            return os.memfd_create("lorax-masks")
    with tempfile.TemporaryFile() as file:  # systems other than Linux
        return os.dup(file.fileno())
