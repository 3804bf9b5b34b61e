"""The library of native kernels: found, loaded, and called with pointers."""

import ctypes
import os
import platform
import sysconfig
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lorax_server.kernels.cpu.abi import ARGUMENT_TYPES, AbiError, Dtype, check_declarations
from lorax_server.kernels.panels import TILE_INPUTS

FOLDER = Path(__file__).parent
# By the name that torch has for what this CPU can do: the names of instruction sets, the best first.
CAPABILITIES = {"AVX2": ("avx2",), "AVX512": ("avx512", "avx2")}
DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
# By instruction set: dtypes that are widened in less time than to read float32 takes. ARM takes longer for float16.
NARROW_DTYPES = {"neon": (torch.bfloat16,)}
OPENMP = ("libgomp", "libiomp5", "libomp")


class NoLibraryError(Exception):
    """There are no native kernels here; the message says why."""


class Library:
    """The kernels of one instruction set, as functions that take addresses and numbers. A call lets other threads run.

    Nothing is checked there: the callers see to shapes, strides and dtypes.
    """

    def __init__(self) -> None:
        name, path = _find_library()
        self.narrow_dtypes = NARROW_DTYPES.get(name, (torch.bfloat16, torch.float16))
        try:
            self._openmp = _share_openmp()
            self._load(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError, ValueError) as error:
            raise NoLibraryError(f"{path.name} cannot be used: {error}") from error

    def _load(self, native: ctypes.CDLL, name: str) -> None:
        """Declare the functions of an instruction set. Raise an `AbiError` where Python and C++ disagree on one."""
        _check_digest(native, name)
        check_declarations(
            lambda what: (ctypes.c_char_p.in_dll(native, f"declaration_{what}_{name}").value or b"").decode()
        )
        for op, types in ARGUMENT_TYPES.items():
            setattr(self, op, _declare(_read_address(native, f"guarded_{op}_{name}"), types))
        # By op: the address of the function by which a program calls it.
        self.entries = {op: _read_address(native, f"words_{op}_{name}") for op in ARGUMENT_TYPES}
        self._read_facts()

    def _read_facts(self) -> None:
        panel, tile_inputs, has_tiles = (ctypes.c_int64() for _ in range(3))
        self.get_facts(*map(ctypes.addressof, (panel, tile_inputs, has_tiles)))
        if tile_inputs.value != TILE_INPUTS:
            raise AbiError(f"a tile has {tile_inputs.value} inputs in C++, but {TILE_INPUTS} in Python")
        self.panel = panel.value  # outputs of a matrix that lie side by side
        self.has_tiles = bool(has_tiles)  # whether this CPU multiplies bfloat16 by tiles (AMX)

    if TYPE_CHECKING:

        def __getattr__(self, op: str) -> Callable[..., None]: ...


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


def _declare(address: int, types: tuple[Any, ...]) -> Callable[..., None]:
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)
    function.restype = _check  # ctypes calls it with the result
    return function  # type: ignore[no-any-return]


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("a kernel could not allocate memory for its threads")


def _read_address(native: ctypes.CDLL, name: str) -> int:
    return ctypes.c_void_p.in_dll(native, name).value or 0


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
