"""Compile CUDA C++ without a CUDA toolkit, and keep the machine code on disk.

A kernel is compiled by NVRTC, a library that torch brings. That takes seconds, so the result is kept in a folder, under
a name made of all that it depends on.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

logger = logging.getLogger(__name__)

DIGEST = hashlib.sha256().digest_size
COMPILING_THREADS = 16


def cache_folder() -> Path:
    """Return the folder of compiled kernels: in `LORAX_KERNEL_CACHE`, or with other caches of the user."""
    given = os.environ.get("LORAX_KERNEL_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lorax/kernels"


class Compiler:
    """Compiles sources for one kind of GPU, e.g. `sm_90a`."""

    def __init__(self, arch: str, folder: Path | None = None) -> None:
        self._arch = arch
        self._folder = folder or cache_folder()
        self.num_compiled = 0  # the others were on disk

    def compile_all(self, sources: Iterable[str]) -> list[bytes]:
        """Compile several sources at once."""
        with ThreadPoolExecutor(COMPILING_THREADS) as threads:
            return list(threads.map(self.compile, sources))

    def compile(self, source: str) -> bytes:
        path = self._folder / f"{self._key(source)}.cubin"
        cubin = _read(path)
        if cubin is None:
            options = ProgramOptions(std="c++17", arch=self._arch, disable_warnings=True)
            cubin = bytes(Program(source, "c++", options).compile("cubin").code)
            self.num_compiled += 1
            _write(path, cubin)
        return cubin

    def _key(self, source: str) -> str:
        version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
        return hashlib.sha256(f"{self._arch}\n{version}\n{source}".encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    """Read a kernel; None if there is none, or only a damaged one."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, cubin = stored[:DIGEST], stored[DIGEST:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Write a kernel as a whole or not at all. A folder that cannot be written costs the next start its time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
