"""Read safetensors files to a GPU.

Threads read chunks into a few pinned buffers while other buffers are copied to the GPU.
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
NUM_BUFFERS = 2 * NUM_THREADS  # half are filled while the other half is copied
BUFFER_BYTES = 4 * 2**20
MAX_HEADER_BYTES = 100_000_000  # same limit as safetensors
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _TensorLocation(NamedTuple):
    """A tensor's location in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _StagingBuffer(NamedTuple):
    """Host memory for one chunk. With a GPU, the memory can be reused after the event `copied`."""

    memory: torch.Tensor
    copied: torch.cuda.Event | None


class WeightsReader:
    """Reads tensors from safetensors files to one device.

    When `read` returns, copies may still run on a separate CUDA stream. Later work on the caller's stream starts after
    these copies.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._stream = make_stream(device)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read weights")
        self._free_buffers: SimpleQueue[_StagingBuffer] = SimpleQueue()  # the least recently used buffer is first
        for _ in range(NUM_BUFFERS):
            memory = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._free_buffers.put(_StagingBuffer(memory, None if self._stream is None else torch.cuda.Event()))
        self._files: dict[Path, _SafetensorsFile] = {}

    def close(self) -> None:
        """Wait for all copies and close the files."""
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            file.close()

    def read(self, path: Path, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """Return a tensor slice in its stored dtype. `shape` is the shape of the whole tensor.

        Only the selected rows are read. Other dimensions are sliced on the device.
        """
        if path not in self._files:
            self._files[path] = _SafetensorsFile(path)
        file = self._files[path]
        location = file.find(name)
        if location.shape != shape:
            raise WeightsError(f"{path}: tensor {name!r} changed while the file was read; restart the server")
        start, rows = location.start, shape[:1]
        if shape and index:
            first, last, _ = index[0].indices(shape[0])
            start += first * math.prod(shape[1:]) * location.dtype.itemsize
            rows = (max(0, last - first),)
        out = torch.empty((*rows, *shape[1:]), dtype=location.dtype, device=self._device)
        self._fill(out, file, start)
        return out[(slice(None), *index[1:])].contiguous() if len(index) > 1 else out

    def _fill(self, out: torch.Tensor, file: "_SafetensorsFile", start: int) -> None:
        """Fill a device tensor with file content, starting at the file offset `start`."""
        flat = out.view(-1).view(torch.uint8)
        if self._stream is not None:  # earlier kernels may still use this memory
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = [
            self._threads.submit(self._copy_chunk, file, start + done, flat[done : done + self._buffer_bytes])
            for done in range(0, len(flat), self._buffer_bytes)
        ]
        wait(copies)  # wait before raising an error, because the other copies write to the tensor
        for copy in copies:
            copy.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.inference_mode()
    def _copy_chunk(self, file: "_SafetensorsFile", start: int, destination: torch.Tensor) -> None:
        """Read a chunk at file offset `start` and start copying it to `destination` on the device."""
        buffer = self._free_buffers.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            chunk = buffer.memory[: len(destination)]
            file.read_into(chunk.numpy().data, start)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                destination.copy_(chunk, non_blocking=True)
                if buffer.copied is not None:
                    buffer.copied.record()
        finally:
            self._free_buffers.put(buffer)


class _SafetensorsFile:
    """An open safetensors file, read without the safetensors library."""

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

    def find(self, name: str) -> _TensorLocation:
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
        return _TensorLocation(STORED_DTYPES[dtype], shape, self._data_start + start)

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with file content at offset `start`. Thread-safe."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], start + done)
            except OSError as error:
                raise WeightsError(f"{self._path}: cannot be read: {error}") from error
            if not count:
                raise WeightsError(f"{self._path}: the file is truncated at byte {start + done}")
            done += count

    def _read_header(self) -> tuple[Mapping[str, Any], int]:
        """Return the tensor entries and the file offset of the data. The safetensors library has validated the file."""
        length_bytes = bytearray(8)
        self.read_into(memoryview(length_bytes), 0)
        length = int.from_bytes(length_bytes, "little")
        if length > MAX_HEADER_BYTES:
            raise WeightsError(f"{self._path}: not a readable safetensors file: its header has {length} bytes")
        text = bytearray(length)
        self.read_into(memoryview(text), 8)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self._path}: not a readable safetensors file: {error}") from error
        if not isinstance(header, dict):
            raise WeightsError(f"{self._path}: not a readable safetensors file: its header is not an object")
        return header, 8 + length
