"""Load and launch CUDA kernels, and create tensor maps for the TMA copy engine."""

import ctypes
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from cuda.bindings import driver

from lorax_server.errors import EngineError
from lorax_server.kernels.hopper.arguments import MAP_BYTES
from lorax_server.kernels.hopper.compiler import Compiler
from lorax_server.kernels.hopper.sources import Variant, find_kernel

logger = logging.getLogger(__name__)


def check_cuda_result(result: tuple[Any, ...]) -> Any:
    """Return the driver call's result. Raise `EngineError` if the call failed."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"CUDA driver error: {error.name}")
    return values[0] if values else None


class Kernel:
    """A loaded kernel on one device. Several threads can launch it: adapters are prepared while steps run."""

    def __init__(self, device: torch.device, cubin: bytes, name: str, shared_bytes: int) -> None:
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._module = check_cuda_result(driver.cuModuleLoadData(cubin))
        self._function = check_cuda_result(driver.cuModuleGetFunction(self._module, name.encode()))
        self._lock = threading.Lock()  # held during a launch, because launches share configs
        self._configs = [_make_launch_config(shared_bytes, early) for early in (False, True)]
        if shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check_cuda_result(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    def launch(
        self,
        blocks: int | tuple[int, int],
        threads: int,
        args: Sequence[ctypes.Structure | ctypes.Array[Any]],
        early: bool,
    ) -> None:
        """Launch the kernel on torch's current stream.

        With `early`, the kernel starts before the previous kernel finishes (programmatic dependent launch).
        """
        if torch._C._cuda_getDevice() != self._index:  # the driver requires the current device
            with torch.cuda.device(self._index):
                return self.launch(blocks, threads, args, early)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        config = self._configs[early]
        with self._lock:
            config.gridDimX, config.gridDimY = blocks if isinstance(blocks, tuple) else (blocks, 1)
            config.blockDimX, config.hStream = threads, stream
            check_cuda_result(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


def _make_launch_config(shared_bytes: int, early: bool) -> driver.CUlaunchConfig:
    """Return a launch config without grid, threads and stream.

    Configs are reused, because creating a config is slow.
    """
    config = driver.CUlaunchConfig()
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = shared_bytes
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


class Kernels:
    """The kernels of one device. A kernel is compiled on first use or in advance by `compile`."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        torch.zeros(1, device=device)  # creates the CUDA context
        self.device = device
        self._compiler = Compiler(f"sm_{properties.major}{properties.minor}a")
        self._loaded: dict[Variant, Kernel] = {}
        self._lock = threading.Lock()  # held while a missing kernel is compiled

    def get(self, variant: Variant) -> Kernel:
        if variant not in self._loaded:
            with self._lock:
                if variant not in self._loaded:
                    logger.info("compiling a CUDA kernel on first use: %s", variant)
                    self._load(variant, self._compiler.compile(variant.source))
        return self._loaded[variant]

    def compile(self, variants: Iterable[Variant]) -> None:
        """Compile kernels in parallel before the first request."""
        start, before = time.monotonic(), self._compiler.num_compiled
        missing = [variant for variant in variants if variant not in self._loaded]
        for variant, cubin in zip(missing, self._compiler.compile_all(v.source for v in missing), strict=True):
            self._load(variant, cubin)
        seconds, compiled = time.monotonic() - start, self._compiler.num_compiled - before
        logger.info(
            "loaded %d CUDA kernels in %.1f s (%d compiled, the rest from the disk cache)",
            len(missing),
            seconds,
            compiled,
        )

    def _load(self, variant: Variant, cubin: bytes) -> None:
        with torch.cuda.device(self.device):
            self._loaded[variant] = Kernel(self.device, cubin, find_kernel(variant.source), variant.shared_bytes)


def matrix_map(matrix: torch.Tensor, rows: int) -> bytes:
    """Return a tensor map for a matrix, with boxes of `rows` x 64 elements."""
    return tensor_map(matrix, (matrix.shape[1], matrix.shape[0]), (matrix.stride(0) * matrix.itemsize,), (64, rows))


def slabs_map(matrix: torch.Tensor, rows: int) -> bytes:
    """Return a tensor map for a matrix as slabs of 64 columns, with boxes of two slabs. The number of columns must be a
    multiple of 64.
    """
    stride = matrix.stride(0) * matrix.itemsize
    return tensor_map(matrix, (64, matrix.shape[0], matrix.shape[1] // 64), (stride, 128), (64, rows, 2))


def lora_factor_maps(buffer: torch.Tensor, stride: int, width: int) -> bytes:
    """Return two TMA tensor maps for LoRA factors in a flat buffer, with boxes of 16 rows and of 8 rows.

    A row has `width` elements, and rows are `stride` elements apart. A box can start at any multiple of 64 elements, so
    the map's dimensions overlap. The buffer must have `15 * stride` elements of padding after the last factor.
    """
    lines = (buffer.numel() - 15 * stride) // 64
    return b"".join(
        tensor_map(buffer, (64, rows, lines), (stride * buffer.itemsize, 128), (64, rows, width // 64))
        for rows in (16, 8)
    )


def tensor_map(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """Return a tensor map.

    `sizes` and `box` start with the innermost dimension. `strides` are in bytes and omit this dimension.
    """
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[tensor.dtype]
    encoded = check_cuda_result(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(sizes),
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)
