"""Read tensors of safetensors files straight to a GPU.

Threads read pieces of a tensor into a few buffers of pinned memory. While these are copied, the next are read. So a
checkpoint passes through little host memory, once, and not through one thread.
"""

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from lorax_server.errors import WeightsError
from lorax_server.kernels.device import make_stream

NUM_THREADS = 8
NUM_BUFFERS = 2 * NUM_THREADS  # while half of them are filled, the others are copied
BUFFER_BYTES = 4 * 2**20
MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _Place(NamedTuple):
    """A tensor's bytes in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _Staging(NamedTuple):
    """Host memory for a piece. On a GPU it is free again after the event."""

    memory: torch.Tensor
    copied: torch.cuda.Event | None


class WeightsReader:
    """Reads tensors by file and name, for one device. Copies are under way on a stream of its own when `read` returns,
    and the caller's stream waits for them."""

    def __init__(self, device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._stream = make_stream(device)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read weights")
        self._free: SimpleQueue[_Staging] = SimpleQueue()  # the longest unused first
        for _ in range(NUM_BUFFERS):
            memory = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._free.put(_Staging(memory, None if self._stream is None else torch.cuda.Event()))
        self._files: dict[Path, _File] = {}

    def close(self) -> None:
        """Wait for all copies, and close the files."""
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            file.close()

    def read(self, path: Path, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor as it is stored. `shape` is that of the whole one, as the caller knows it.

        Only the rows that are asked for are read. Of further dimensions all is read, and cut on the device.
        """
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        place = file.find(name)
        if place.shape != shape:
            raise WeightsError(f"{path}: tensor {name!r} has changed while the file was read; start again")
        start, rows = place.start, shape[:1]
        if shape and index:
            first, last, _ = index[0].indices(shape[0])
            start += first * math.prod(shape[1:]) * place.dtype.itemsize
            rows = (max(0, last - first),)
        out = torch.empty((*rows, *shape[1:]), dtype=place.dtype, device=self._device)
        self._fill(out, file, start)
        return out[(slice(None), *index[1:])].contiguous() if len(index) > 1 else out

    def _fill(self, out: torch.Tensor, file: "_File", start: int) -> None:
        """Read a tensor of the device from a stretch of a file."""
        flat = out.view(-1).view(torch.uint8)
        if self._stream is not None:  # steps before may still read what was in this memory
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        moves = [
            self._threads.submit(self._move, file, start + done, flat[done : done + self._buffer_bytes])
            for done in range(0, len(flat), self._buffer_bytes)
        ]
        wait(moves)  # before an error of one: the others write to the tensor
        for move in moves:
            move.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.inference_mode()
    def _move(self, file: "_File", start: int, target: torch.Tensor) -> None:
        """Read a piece of a file, and begin to copy it."""
        buffer = self._free.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            piece = buffer.memory[: len(target)]
            file.read_into(piece.numpy().data, start)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                target.copy_(piece, non_blocking=True)
                if buffer.copied is not None:
                    buffer.copied.record()
        finally:
            self._free.put(buffer)


class _File:
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise WeightsError(f"{path}: not a readable safetensors file: {error}") from error
        try:
            self._header, self._data_start = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def find(self, name: str) -> _Place:
        try:
            entry = self._header[name]
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            num_bytes, num_elements = stop - start, math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{self._path}: tensor {name!r} cannot be read: {error}") from error
        if dtype not in STORED_DTYPES:
            raise WeightsError(f"{self._path}: tensor {name!r} has an unknown dtype, {dtype}")
        if start < 0 or num_bytes != num_elements * STORED_DTYPES[dtype].itemsize:
            raise WeightsError(f"{self._path}: tensor {name!r} of shape {shape} does not have {num_bytes} bytes")
        return _Place(STORED_DTYPES[dtype], shape, self._data_start + start)

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory from a place on. Other threads may read at the same time."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], start + done)
            except OSError as error:
                raise WeightsError(f"{self._path}: cannot be read: {error}") from error
            if not count:
                raise WeightsError(f"{self._path}: ends at byte {start + done}, before its last tensor")
            done += count

    def _read_header(self) -> tuple[Mapping[str, Any], int]:
        """Read where tensors are, and where their bytes begin. safetensors has checked the file before."""
        length_bytes = bytearray(8)
        self.read_into(memoryview(length_bytes), 0)
        length = int.from_bytes(length_bytes, "little")
        if length > MAX_HEADER_BYTES:
            raise WeightsError(f"{self._path}: not a readable safetensors file: its header would have {length} bytes")
        text = bytearray(length)
        self.read_into(memoryview(text), 8)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self._path}: not a readable safetensors file: {error}") from error
        if not isinstance(header, dict):
            raise WeightsError(f"{self._path}: not a readable safetensors file: its header is no object")
        return header, 8 + length
