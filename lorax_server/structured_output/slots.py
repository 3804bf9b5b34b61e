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
MAX_SLOTS = 2**14  # answers of a vocabulary at once, also those that wait; only slots that are used take memory
KEPT_SLOTS = 256  # the lowest ones, whose memory stays


class MaskSlots:
    """The engine's side. Its thread takes slots, the lowest first, and gives them back; the thread that hears of masks
    opens and reads them."""

    def __init__(self) -> None:
        self.file = _make_file()
        self._free = list(range(MAX_SLOTS))  # a heap
        self._masks: Words | None = None

    @property
    def is_open(self) -> bool:
        return self._masks is not None

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


class WrittenSlots:
    """The side of the process that writes masks. What many answers at once have used is given back when they end."""

    def __init__(self, masks: Words, memory: mmap.mmap | None = None) -> None:
        """`masks` are those of all slots, [slots, words], in a `memory` that can be given back, if it can."""
        self.masks = masks
        self._memory = memory
        self._is_used = np.zeros(len(masks), np.bool_)

    @classmethod
    def open(cls, file: int, row_words: int) -> "WrittenSlots":
        os.ftruncate(file, MAX_SLOTS * row_words * 4)
        memory = mmap.mmap(file, 0)
        masks = np.frombuffer(memory, np.int32).reshape(MAX_SLOTS, row_words)
        return cls(masks, memory if hasattr(mmap, "MADV_REMOVE") else None)  # only Linux has it

    def take(self, slot: int) -> None:
        self._is_used[slot] = True

    def give_back(self, slot: int) -> None:
        """Give back the memory of a slot, in pages, of which the first and the last may be those of others too."""
        self._is_used[slot] = False
        if self._memory is None or slot < KEPT_SLOTS:
            return
        row, page = self.masks.strides[0], mmap.PAGESIZE
        first, end = slot * row // page, -(-(slot + 1) * row // page)
        first += not self._is_free(first)
        end -= first < end and not self._is_free(end - 1)
        if first < end:
            with suppress(OSError):  # a file in place of memory: not all file systems can
                self._memory.madvise(mmap.MADV_REMOVE, first * page, (end - first) * page)

    def _is_free(self, page: int) -> bool:
        row, size = self.masks.strides[0], mmap.PAGESIZE
        slots = slice(page * size // row, -(-(page + 1) * size // row))
        return slots.start >= KEPT_SLOTS and not self._is_used[slots].any()


def _make_file() -> int:
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # some sandboxes do not have it
            return os.memfd_create("lorax-masks")
    with tempfile.TemporaryFile() as file:  # systems other than Linux
        return os.dup(file.fileno())
