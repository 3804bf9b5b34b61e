"""Build the native CPU kernels. The rest of the configuration is in pyproject.toml.

The kernels are plain shared libraries, which Python loads with ctypes. They do not use Python's C API, so one wheel per
platform serves all Python versions: its tag is `py3-none-<platform>`.
"""

import platform
import sys
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("lorax_server/kernels/cpu/native")  # setuptools requires relative paths
HEADERS = sorted(NATIVE.glob("*.h"))
# Only Linux has native kernels. Other systems use the reference ops.
INSTRUCTION_SETS = {"aarch64": ["neon"], "x86_64": ["avx2", "avx512"]} if sys.platform == "linux" else {}
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


class BuildLibraries(build_ext):
    """Name libraries without the Python version, for example `_avx2.so`."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """Tag the wheel for this platform and every Python version.

    A wheel without native kernels also gets a platform tag. Otherwise, pip could choose it on a platform with kernels.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def make_extension(name: str) -> Extension:
    """Describe the library for one instruction set.

    It does not link OpenMP, because it uses torch's. The build is optional: without a compiler, lorax_server uses the
    reference ops.
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
    ext_modules=[make_extension(name) for name in INSTRUCTION_SETS.get(platform.machine(), ())],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildLibraries},
    options={"build_ext": {"parallel": 2}},
)
