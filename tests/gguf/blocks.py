"""Random quantized blocks of all tensor types. The `gguf` package cannot quantize to all of them."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

# Byte offsets of the float16 factors in a block.
FACTORS = {Type.Q4_1: (0, 2), Type.Q5_1: (0, 2), Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2)}
FACTORS |= {Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
FLOATS = {Type.F32: np.float32, Type.F16: np.float16}


def random_blocks(kind: Type, rows: int, inputs: int, spread: float = 0.3) -> npt.NDArray[np.uint8]:
    """Return the bytes of a random matrix whose weights have about the given spread."""
    generator = np.random.default_rng(kind)
    if kind in FLOATS:
        return generator.normal(0, spread, (rows, inputs)).astype(FLOATS[kind]).view(np.uint8)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * inputs // block, num_bytes), dtype=np.uint8)
    if kind is Type.BF16:
        halves = generator.normal(0, spread, (rows, inputs)).astype(np.float32).view(np.uint16)[:, 1::2].copy()
        return halves.view(np.uint8)
    steps = {Type.Q8_0: 128, Type.IQ4_NL: 128, Type.IQ4_XS: 4096, Type.Q6_K: 4096, Type.Q3_K: 128, Type.Q2_K: 48}
    steps |= {Type.Q4_K: 960, Type.Q5_K: 1920}
    for offset in FACTORS.get(kind, (0,)):
        factors = generator.normal(0, 2 * spread / steps.get(kind, 16), len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
