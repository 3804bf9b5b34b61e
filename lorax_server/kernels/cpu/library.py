"""The library of native kernels: found, loaded, and called with pointers."""

import ctypes
import os
import platform
import sysconfig
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
# By the name that torch has for what this CPU can do: the names of instruction sets, the best first.
CAPABILITIES = {"AVX2": ("avx2",), "AVX512": ("avx512", "avx2")}
VECTORS = {"neon": 4, "avx2": 8, "avx512": 16}  # floats in a vector
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# By instruction set: dtypes that are widened in less time than to read float32 takes. ARM takes longer for float16.
NARROW_DTYPES = {"neon": (torch.bfloat16,)}
PAIRS = 3  # in the place of a dtype: a bfloat16 matrix whose inputs lie in pairs
OPENMP = ("libgomp", "libiomp5", "libomp")

# Addresses and numbers of 64 bits: ctypes passes a number as an address in a third of the time.
P = N = ctypes.c_void_p
R = ctypes.c_float
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "linear": (P, P, N, N, P, P, N, N, N),
    "use_tiles": (P,),
    "look_up": (P, N, N, N, P, N, N, P),
    "rms_norm": (N, P, N, N, P, P, N, P, P, P, N, N, N, P, N),
    "layer_norm": (N, P, N, N, P, P, R, P, N, N, N, P, N),
    "scale_and_shift": (N, P, N, N, P, N, N),
    "gate": (N, N, P, N, P, N, N),
    "choose_greedy": (N, P, N, N, N, P, N, P, P, P),
    "find_logprobs": (N, P, N, N, N, P, P, N, P, P, N, P),
    "find_best": (N, P, N, N, N, N, P, N, P, P, P),
    "rotary": (P, N, N, N, N, P, P, N, N),
    "write_kv": (P, P, N, N, P, N, N, P, P),
    "decode_attention": (P, P, N, N, P, P, P, N, R, N, R, P),
    "prefill_attention": (P, P, N, N, P, N, N, P, N, N, P, P, P, N, R, N, R, P),
    "run_program": (P, N, N),
}
# Those of a decode step's layers, which a program can hold: `native/program.h` lists them, too.
RECORDED = ("linear", "rms_norm", "layer_norm", "scale_and_shift", "gate", "rotary", "write_kv", "decode_attention")


class NoLibraryError(Exception):
    """There are no native kernels here; the message says why."""


class Library:
    """The kernels of one instruction set, as functions that take addresses and numbers. A call lets other threads run.

    Nothing is checked there: the callers see to shapes, strides and dtypes.
    """

    linear: Callable[..., None]
    use_tiles: Callable[..., None]
    look_up: Callable[..., None]
    rms_norm: Callable[..., None]
    layer_norm: Callable[..., None]
    scale_and_shift: Callable[..., None]
    gate: Callable[..., None]
    choose_greedy: Callable[..., None]
    find_logprobs: Callable[..., None]
    find_best: Callable[..., None]
    rotary: Callable[..., None]
    write_kv: Callable[..., None]
    decode_attention: Callable[..., None]
    prefill_attention: Callable[..., None]
    run_program: Callable[..., None]

    def __init__(self) -> None:
        name, path = _find_library()
        self.panel = 2 * VECTORS[name]  # outputs of a matrix that lie side by side
        self.narrow_dtypes = NARROW_DTYPES.get(name, (torch.bfloat16, torch.float16))
        try:
            self._openmp = _share_openmp()
            native = ctypes.CDLL(str(path))
            _check_digest(native, name)
            for op, types in SIGNATURES.items():
                setattr(self, op, _declare(native, f"{op}_{name}", types))
            # By op: the address of the function by which a program calls it.
            self.entries = {op: _find_address(native, f"call_{op}_{name}") for op in RECORDED}
        except (OSError, AttributeError, ValueError) as error:
            raise NoLibraryError(f"{path.name} cannot be used: {error}") from error
        self.has_tiles = self._ask_for_tiles()  # whether this CPU multiplies bfloat16 by tiles (AMX)

    def _ask_for_tiles(self) -> bool:
        may = ctypes.c_int64()
        self.use_tiles(ctypes.addressof(may))
        return bool(may)


def _find_library() -> tuple[str, Path]:
    capability = torch.backends.cpu.get_cpu_capability()
    names = ("neon",) if _is_arm() else CAPABILITIES.get(capability, ())
    if not names:
        raise NoLibraryError(f"this CPU has no vectors that they are written for (torch calls it {capability})")
    for name in names:
        path = FOLDER / f"_{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if path.exists():
            return name, path
    raise NoLibraryError("they were not built: install lorax_server again, with a C++ compiler, and read its errors")


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def _check_digest(native: ctypes.CDLL, name: str) -> None:
    """Refuse a library that was built of other sources than those beside it: it may take other arguments."""
    native.digest.restype = ctypes.c_char_p
    source = FOLDER / "native" / f"{name}.cpp"
    if source.exists():
        texts = b"".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])
        if native.digest().decode() != sha256(texts).hexdigest()[:16]:
            raise NoLibraryError("they were built of other sources than these: install lorax_server again (make venv)")


def _declare(native: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., None]:
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int, *types)(ctypes.c_void_p.in_dll(native, f"guarded_{name}").value or 0)
    function.restype = _check  # ctypes calls it with the result
    return function  # type: ignore[no-any-return]


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("a kernel could not allocate memory for its threads")


def _find_address(native: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(native, name), ctypes.c_void_p).value or 0


def _share_openmp() -> ctypes.CDLL:
    """Make torch's OpenMP known to the library, which asks it how many threads there may be."""
    found = [path for path in _loaded_libraries() if os.path.basename(path).startswith(OPENMP)]
    if not found:
        raise NoLibraryError("torch comes without OpenMP, which says how many threads there may be")
    beside_torch = str(Path(torch.__file__).parent)  # in torch/ or in torch.libs/
    ours = [path for path in found if path.startswith(beside_torch)]
    return ctypes.CDLL((ours or found)[0], mode=ctypes.RTLD_GLOBAL)


def _loaded_libraries() -> list[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = maps.read_text().splitlines()
        return sorted({line[line.index("/") :] for line in lines if "/" in line})
    return sorted(map(str, (Path(torch.__file__).parent / "lib").iterdir()))
