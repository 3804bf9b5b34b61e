"""Build the kernels for CPUs. All else is in pyproject.toml."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("lorax_server/kernels/cpu/native")  # setuptools wants paths relative to this folder
SOURCES = sorted(NATIVE.glob("*.cpp"))
HEADERS = sorted(NATIVE.glob("*.h"))
DIGEST = sha256(b"".join(path.read_bytes() for path in SOURCES + HEADERS)).hexdigest()[:16]

setup(
    ext_modules=[
        # A plain library, which Python loads with ctypes. It is linked to no OpenMP: it shares torch's, with its threads.
        Extension(
            "lorax_server.kernels.cpu._native",
            sources=list(map(str, SOURCES)),
            depends=list(map(str, HEADERS)),
            define_macros=[("DIGEST", f'"{DIGEST}"')],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-Wno-psabi",
                "-g0",
            ],
            optional=True,  # without a compiler, plain torch serves
        )
    ]
)
