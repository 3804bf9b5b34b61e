"""Build the kernels for CPUs. All else is in pyproject.toml."""

import platform
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("lorax_server/kernels/cpu/native")  # setuptools requires relative paths
HEADERS = sorted(NATIVE.glob("*.h"))
INSTRUCTION_SETS = {"aarch64": ["neon"], "arm64": ["neon"], "x86_64": ["avx2", "avx512"], "AMD64": ["avx2", "avx512"]}
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-schedule-insns",  # scheduling would need too many registers
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-g0",
]


def extension(name: str) -> Extension:
    """Describe a plain library, which Python loads with ctypes.

    It is linked to no OpenMP: it shares torch's, with its threads. Without a compiler, plain torch serves.
    """
    source = NATIVE / f"{name}.cpp"
    digest = sha256(b"".join(path.read_bytes() for path in [source, *HEADERS])).hexdigest()[:16]
    return Extension(
        f"lorax_server.kernels.cpu._{name}",
        sources=[str(source)],
        depends=list(map(str, HEADERS)),
        define_macros=[("DIGEST", f'"{digest}"')],
        extra_compile_args=FLAGS,
        optional=True,
    )


setup(
    ext_modules=list(map(extension, INSTRUCTION_SETS.get(platform.machine(), []))),
    options={"build_ext": {"parallel": 2}},
)
