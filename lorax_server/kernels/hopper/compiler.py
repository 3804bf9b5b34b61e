"""Compiles CUDA C++ sources with NVRTC, and caches the cubins on disk.

NVRTC is installed with torch, so no CUDA toolkit is needed. The cache key is a hash of the architecture, the NVRTC
version and the source.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from lorax_server.files.disk_cache import cache_folder, load, make_key, store

COMPILE_THREADS = 16


class Compiler:
    """Compiles sources for one GPU architecture, for example `sm_90a`."""

    def __init__(self, arch: str, folder: Path | None = None) -> None:
        self._arch = arch
        self._folder = folder or cache_folder("kernels")
        self.num_compiled = 0  # number of compilations, without cache hits

    def compile_all(self, sources: Iterable[str]) -> list[bytes]:
        """Compile several CUDA sources in parallel, and return the cubins in the same order."""
        with ThreadPoolExecutor(COMPILE_THREADS) as threads:
            return list(threads.map(self.compile, sources))

    def compile(self, source: str) -> bytes:
        path = self._folder / f"{self._key(source)}.cubin"
        cubin = load(path)
        if cubin is None:
            options = ProgramOptions(std="c++17", arch=self._arch, disable_warnings=True)
            cubin = bytes(Program(source, "c++", options).compile("cubin").code)
            self.num_compiled += 1
            store(path, cubin)
        return cubin

    def _key(self, source: str) -> str:
        version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
        return make_key(self._arch, version, source)
