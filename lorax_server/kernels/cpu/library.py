"""Find and load the native kernel library, and bind its functions."""

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lorax_server.kernels.cpu.abi import ARGUMENT_TYPES, AbiError, Dtype, check_abi
from lorax_server.kernels.panels import TILE_INPUTS

PACKAGE_DIR = Path(__file__).parent
# torch's CPU capability -> usable instruction sets, best first.
INSTRUCTION_SETS = {"AVX2": ("avx2",), "AVX512": ("avx512", "avx2")}
DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
# Dtypes that are faster to read and widen than float32. On ARM, float16 is slower.
NARROW_DTYPES = {"neon": (torch.bfloat16,)}
OPENMP_PREFIXES = ("libgomp", "libiomp5", "libomp")


class LibraryUnavailableError(Exception):
    """Raised if no native kernel library can be used. The message contains the reason."""


class Library:
    """The native kernels for one instruction set. Their arguments are addresses and numbers, and calls release the GIL.

    The functions do not validate their arguments, so callers must check shapes, strides and dtypes.
    """

    def __init__(self) -> None:
        name, path = _find_library()
        self.name = name
        self.narrow_dtypes = NARROW_DTYPES.get(name, (torch.bfloat16, torch.float16))
        try:
            self._openmp = _load_torch_openmp()
            self._load(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError, ValueError) as error:
            raise LibraryUnavailableError(f"{path.name} cannot be loaded: {error}") from error

    def _load(self, native: ctypes.CDLL, name: str) -> None:
        """Bind the functions for the instruction set `name`. Raise `AbiError` if the Python and C++ declarations
        differ.
        """
        _check_digest(native, name)
        check_abi(lambda symbol: (ctypes.c_char_p.in_dll(native, f"declaration_{symbol}_{name}").value or b"").decode())
        for op, types in ARGUMENT_TYPES.items():
            setattr(self, op, _make_function(_read_address(native, f"guarded_{op}_{name}"), types))
        # op -> address of the function that a graph calls.
        self.entries = {op: _read_address(native, f"words_{op}_{name}") for op in ARGUMENT_TYPES}
        self._read_cpu_features()

    def _read_cpu_features(self) -> None:
        features = panel, tile_inputs, weight_bias, has_tiles, has_dot = tuple(ctypes.c_int64() for _ in range(5))
        self.get_cpu_features(*map(ctypes.addressof, features))
        if tile_inputs.value != TILE_INPUTS:
            raise AbiError(f"TILE_INPUTS is {tile_inputs.value} in C++, but {TILE_INPUTS} in Python")
        self.panel = panel.value  # output columns per panel
        self.weight_bias = weight_bias.value  # added to stored 8-bit weights
        self.has_tiles = bool(has_tiles)  # whether this CPU has AMX bfloat16 tiles
        self.has_dot = bool(has_dot)  # whether this CPU has the integer dot product instruction (VNNI or SDOT)

    if TYPE_CHECKING:

        def __getattr__(self, op: str) -> Callable[..., None]: ...


def _find_library() -> tuple[str, Path]:
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux":
        raise LibraryUnavailableError("they exist only for Linux")
    names = ("neon",) if _is_arm() else INSTRUCTION_SETS.get(capability, ())
    if not names:
        raise LibraryUnavailableError(f"this CPU has no supported vector instructions (torch capability: {capability})")
    for name in names:
        path = PACKAGE_DIR / f"_{name}.so"
        if path.exists():
            return name, path
    raise LibraryUnavailableError(
        "the library was not built: reinstall lorax_server with a C++ compiler and check the build errors"
    )


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def _check_digest(native: ctypes.CDLL, name: str) -> None:
    """Raise an error if the library was not built from the installed sources."""
    native.digest.restype = ctypes.c_char_p
    source = PACKAGE_DIR / "native" / f"{name}.cpp"
    if source.exists():
        texts = b"".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])
        if native.digest().decode() != sha256(texts).hexdigest()[:16]:
            raise LibraryUnavailableError(
                "the library was built from different sources: reinstall lorax_server (make venv)"
            )


def _make_function(address: int, types: tuple[Any, ...]) -> Callable[..., None]:
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)
    function.restype = _raise_if_failed  # ctypes calls this function with the result
    return function  # type: ignore[no-any-return]


def _raise_if_failed(failed: int) -> None:
    if failed:
        raise MemoryError("a native kernel could not allocate scratch memory")


def _read_address(native: ctypes.CDLL, name: str) -> int:
    return ctypes.c_void_p.in_dll(native, name).value or 0


def _load_torch_openmp() -> ctypes.CDLL:
    """Load torch's OpenMP globally. The native library reads the number of threads from it."""
    paths = [path for path in _loaded_libraries() if os.path.basename(path).startswith(OPENMP_PREFIXES)]
    if not paths:
        raise LibraryUnavailableError("torch has no OpenMP library, which sets the number of threads")
    torch_folder = str(Path(torch.__file__).parent)  # the library is in torch/ or in torch.libs/
    bundled = [path for path in paths if path.startswith(torch_folder)]
    return ctypes.CDLL((bundled or paths)[0], mode=ctypes.RTLD_GLOBAL)


def _loaded_libraries() -> list[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = maps.read_text().splitlines()
        return sorted({line[line.index("/") :] for line in lines if "/" in line})
    return sorted(map(str, (Path(torch.__file__).parent / "lib").iterdir()))
