"""GPUs by name: memory, bandwidth and speed, as their makers publish them."""

import difflib
from collections.abc import Mapping
from typing import NamedTuple

from lorax_server.errors import ConfigError

MIB = 2**20


class Gpu(NamedTuple):
    """A GPU's memory in bytes, bytes a second and bfloat16 operations a second (dense) of its data sheet."""

    name: str
    memory: float
    bandwidth: float
    flop: float


# Memory is what the driver reports, a little less than the data sheet says.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 183_359 * MIB, 8.0e12, 2250e12),
        Gpu("H200", 143_771 * MIB, 4.8e12, 989e12),
        Gpu("GH200-96GB", 97_871 * MIB, 4.0e12, 989e12),
        Gpu("H100", 81_559 * MIB, 3.35e12, 989e12),
        Gpu("H100-NVL", 95_830 * MIB, 3.9e12, 835e12),
        Gpu("H100-PCIe", 81_559 * MIB, 2.0e12, 756e12),
        Gpu("H20", 97_871 * MIB, 4.0e12, 148e12),
        Gpu("A100-80GB", 81_920 * MIB, 2.039e12, 312e12),
        Gpu("A100-80GB-PCIe", 81_920 * MIB, 1.935e12, 312e12),
        Gpu("A100-40GB", 40_960 * MIB, 1.555e12, 312e12),
        Gpu("A40", 46_068 * MIB, 0.696e12, 149.7e12),
        Gpu("A10", 23_028 * MIB, 0.6e12, 125e12),
        Gpu("L40S", 46_068 * MIB, 0.864e12, 362e12),
        Gpu("L4", 23_034 * MIB, 0.3e12, 121e12),
        Gpu("RTX-4090", 24_564 * MIB, 1.008e12, 165e12),
        Gpu("RTX-3090", 24_576 * MIB, 0.936e12, 71e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name, however it is written."""
    known = {_plain(gpu): gpu for gpu in GPUS}
    plain = _plain(name.upper().removeprefix("NVIDIA"))
    if plain in known:
        return GPUS[known[plain]]
    close = difflib.get_close_matches(plain, known, 3, cutoff=0.5)
    meant = f"is it {' or '.join(known[each] for each in close)}?" if close else f"known are {', '.join(GPUS)}."
    raise ConfigError(
        f"--gpu {name[:100]!r} is not known; {meant} For others give --gpu-memory, --gpu-bandwidth and --gpu-tflops"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
