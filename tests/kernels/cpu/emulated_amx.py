"""Build the linear kernels with emulated AMX tiles, for tests on any CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from lorax_server.kernels.cpu.abi import ARGUMENT_TYPES
from lorax_server.kernels.cpu.library import PACKAGE_DIR, Library

SOURCE = Path(__file__).parent / "emulated_amx.cpp"
FLAGS = [
    "-std=c++17",
    "-O0",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-w",
]
OPS = ("linear", "look_up_rows", "get_cpu_features")


class EmulatedLibrary(Library):
    """A library with only the linear kernels."""

    def __init__(self, path: Path) -> None:
        native = ctypes.CDLL(str(path))
        for op in OPS:
            function = getattr(native, f"{op}_emulated")
            function.argtypes, function.restype = ARGUMENT_TYPES[op], None
            setattr(self, op, function)
        self.narrow_dtypes = (torch.bfloat16,)
        self._read_cpu_features()


def build_emulated(folder: Path) -> EmulatedLibrary:
    Library()  # OpenMP comes from torch
    path, compiler = folder / "emulated.so", shutil.which("c++") or shutil.which("g++")
    assert compiler, "the native kernels were built, so there is a C++ compiler"
    subprocess.run([compiler, *FLAGS, f"-I{PACKAGE_DIR / 'native'}", str(SOURCE), "-o", str(path)], check=True)
    return EmulatedLibrary(path)
