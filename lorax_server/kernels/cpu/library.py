"""The library of native kernels: found, loaded, and called with pointers."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

FOLDER = Path(__file__).parent
# By the name that torch has for what this CPU can do: the ending of the kernels' names, and floats in a vector.
INSTRUCTION_SETS = {"AVX2": ("avx2", 8), "AVX512": ("avx512", 16)}
ARM: Final = ("neon", 4)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OPENMP = ("libgomp", "libiomp5", "libomp")

# Addresses and numbers of 64 bits: ctypes passes a number as an address in a third of the time.
P = N = ctypes.c_void_p
R = ctypes.c_float
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "linear": (P, P, N, N, P, P, N, N, N),
    "rms_norm": (N, P, N, N, P, P, P, P, P, N, N, N, P, N),
    "layer_norm": (N, P, N, N, P, P, R, P, N, N, N, P, N),
    "gate": (N, N, P, N, P, N, N),
    "choose_greedy": (N, P, N, N, N, P, P),
    "rotary": (P, N, N, N, N, P, P, N, N),
    "write_kv": (P, P, N, N, P, N, N, P, P),
    "decode_attention": (P, P, N, N, P, P, P, N, R, N),
    "prefill_attention": (P, P, N, N, P, N, N, P, N, N, P, P, P, N, R, N),
    "find_logprobs": (N, P, N, N, N, P, P, N, P),
    "find_best": (N, P, N, N, N, N, P, P),
}


class NoLibraryError(Exception):
    """There are no native kernels here; the message says why."""


class Library:
    """The kernels of one instruction set, as functions that take addresses and numbers. A call lets other threads run.

    Nothing is checked there: the callers see to shapes, strides and dtypes.
    """

    def __init__(self) -> None:
        name, self.vector = _find_instruction_set()
        path = next(FOLDER.glob(f"_{name}*.so"), None)
        if path is None:
            raise NoLibraryError("they were not built, since there was no C++ compiler when lorax_server was installed")
        self._openmp = _share_openmp()
        try:
            native = ctypes.CDLL(str(path))
            for op, types in SIGNATURES.items():  # as attributes, which are found faster than by `__getattr__`
                setattr(self, op, _declare(native, f"{op}_{name}", types))
            native.digest.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NoLibraryError(f"{path.name} cannot be used: {error}") from error
        self.digest = native.digest().decode()
        self.panel = 2 * self.vector  # outputs of a matrix that lie side by side

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"there is no kernel {name}")


def _find_instruction_set() -> tuple[str, int]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in INSTRUCTION_SETS:
        return INSTRUCTION_SETS[capability]
    if _is_arm():
        return ARM
    raise NoLibraryError(f"this CPU has no vectors that they are written for (torch calls it {capability})")


def _is_arm() -> bool:
    import platform

    return platform.machine().lower() in ("aarch64", "arm64")


def _declare(native: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., None]:
    function = getattr(native, name)
    function.argtypes, function.restype = types, None
    return function  # type: ignore[no-any-return]


def _share_openmp() -> ctypes.CDLL:
    """Make torch's OpenMP known to the library, so that both have the same threads: two sets would fight for cores."""
    for path in _loaded_libraries():
        if path.name.startswith(OPENMP):
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    raise NoLibraryError("torch comes without OpenMP, whose threads they share")


def _loaded_libraries() -> list[Path]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = maps.read_text().splitlines()
        return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")})
    return sorted((Path(torch.__file__).parent / "lib").iterdir())
