"""Compiles the kernels for quantized weights for a compute capability, and prints the number of kernels."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorax_server.kernels.triton import experts, quantized
from tests.kernels.quantized_cases import Kind

KINDS: list[Kind] = [
    *[(4, 128, "offsets"), (4, 32, "plain"), (4, 16, "offsets"), (4, 64, "levels")],
    *[(8, 32, "plain"), (8, 16, "plain"), (8, 4096, "plain"), (8, 128, "levels"), (8, 64, "offsets")],
]
MAX_SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}  # smallest limit of GPUs with a compute capability of 8 or 9
INPUTS, OUTPUTS = 4096, 1536


def compile_kernel(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> None:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES[capability]


def compile_all(capability: int, dtype: str) -> int:
    count = 0
    for bits, block, extra in KINDS:
        part = (32 if bits == 4 else 16) if block == quantized.MIN_BLOCK else min(quantized.MAX_PART_INPUTS, block)
        encoding = {"INPUTS": INPUTS, "BITS": bits, "BLOCK": block, "PART": part, "HAS_OFFSETS": extra == "offsets"}
        encoding |= {"HAS_LEVELS": extra == "levels", "IS_FLOAT8": extra == "levels" and bits == 8}
        values = "*u8" if bits == 4 or extra == "levels" else "*i8"
        types = {"values": values, "matrices": values, "scales": "*fp16", "offsets": "*fp32", "levels": "*fp32"}
        types |= dict.fromkeys(("out", "x", "bias", "biases"), f"*{dtype}")
        types |= {"num_rows": "i32", "stride": "i32", "order": "*i32", "starts": "*i32"}
        shared = {"OUTPUTS": OUTPUTS, "HAS_BIAS": True, "INTERPRETED": False} | encoding
        for rows in (16, quantized.MAX_ROWS):
            sizes = {"HEIGHT": rows, "BLOCK_N": quantized.WIDE_BLOCK_N, "PARTS": quantized.STEP_INPUTS // part}
            compile_kernel(quantized._multiply, capability, types, shared | sizes, 2, quantized.STAGE_BYTES // 2)
        compile_kernel(quantized._decode, capability, types, encoding | {"OUTPUTS": OUTPUTS, "BLOCK_N": 64}, 4, 3)
        sizes = {"HEIGHT": 64, "BLOCK_N": 128, "BLOCK_K": 64, "EXPERTS": 128, "BLOCK_E": 128, "TOP_K": 8}
        compile_kernel(experts._product, capability, types, shared | sizes | {"GATHERS": True}, 8, 3)
        count += 4
    return count


if __name__ == "__main__":
    print("compiled", compile_all(int(sys.argv[1]), "bf16"))
