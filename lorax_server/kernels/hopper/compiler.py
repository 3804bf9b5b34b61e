"""Compile CUDA C++ without a CUDA toolkit, and keep the machine code on disk.

A kernel is compiled by NVRTC, a library that torch brings. That takes seconds, so the result is kept in a folder, under
a name made of all that it depends on.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from lorax_server.files.kept import keep, kept_folder, make_name, read_kept

COMPILING_THREADS = 16


class Compiler:
    """Compiles sources for one kind of GPU, e.g. `sm_90a`."""

    def __init__(self, arch: str, folder: Path | None = None) -> None:
        self._arch = arch
        self._folder = folder or kept_folder("kernels")
        self.num_compiled = 0  # the others were on disk

    def compile_all(self, sources: Iterable[str]) -> list[bytes]:
        """Compile several sources at once."""
        with ThreadPoolExecutor(COMPILING_THREADS) as threads:
            return list(threads.map(self.compile, sources))

    def compile(self, source: str) -> bytes:
        path = self._folder / f"{self._key(source)}.cubin"
        cubin = read_kept(path)
        if cubin is None:
            options = ProgramOptions(std="c++17", arch=self._arch, disable_warnings=True)
            cubin = bytes(Program(source, "c++", options).compile("cubin").code)
            self.num_compiled += 1
            keep(path, cubin)
        return cubin

    def _key(self, source: str) -> str:
        version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
        return make_name(self._arch, version, source)
