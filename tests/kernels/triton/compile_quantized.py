"""Compiles the kernels for quantized weights for a compute capability, and prints the number of kernels."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorax_server.kernels.quantized import MIN_BLOCK
from lorax_server.kernels.triton import experts, quantized
from tests.kernels.quantized_cases import Kind

KINDS: list[Kind] = [
    (4, 128, "offsets"),
    (4, 16, "offsets"),
    (4, 64, "levels"),
    (8, 32, "plain"),
    (8, 128, "levels"),
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


def compile_all(capability: int, dtype: str, kinds: list[Kind]) -> int:
    count, size = 0, {"bf16": 2, "fp32": 4}[dtype]
    for bits, block, extra in kinds:
        part = (32 if bits == 4 else 16) if block == MIN_BLOCK else min(quantized.MAX_PART_INPUTS, block)
        encoding = {"INPUTS": INPUTS, "BITS": bits, "BLOCK": block, "PART": part, "HAS_OFFSETS": extra == "offsets"}
        encoding |= {"HAS_LEVELS": extra == "levels", "IS_FLOAT8": extra == "levels" and bits == 8}
        values = "*u8" if bits == 4 or extra == "levels" else "*i8"
        types = {"values": values, "matrices": values, "scales": "*fp32", "offsets": "*fp32", "levels": "*fp32"}
        types |= dict.fromkeys(("out", "x", "bias", "biases"), f"*{dtype}")
        types |= {"num_rows": "i32", "outputs": "i32", "stride": "i32", "order": "*i32", "starts": "*i32"}
        shared = {"OUTPUTS": OUTPUTS, "HAS_BIAS": True, "INTERPRETED": False} | encoding
        for rows, block_n in (
            (16, quantized.NARROW_BLOCK_N),
            (32, quantized.WIDE_BLOCK_N),
            (64, quantized.WIDE_BLOCK_N),
        ):
            sizes = {"HEIGHT": rows, "BLOCK_N": block_n, "PARTS": quantized.STEP_INPUTS // part}
            compile_kernel(quantized._multiply, capability, types, shared | sizes, 2, quantized.PIPELINE_BYTES // size)
        compile_kernel(quantized._dequantize, capability, types, encoding | {"BLOCK_N": 64}, 4, 3)
        shared |= {"PART": min(part, experts.PART_BYTES // size), "EXPERTS": 128, "BLOCK_E": 128, "TOP_K": 8}
        for rows, block_n, warps, stages in ((16, 64, 4, 4), (64, 128, 8, 3), (128, 128, 8, 3)):
            sizes = {"HEIGHT": rows, "BLOCK_N": block_n, "BLOCK_K": 64, "GATHERS": True}
            compile_kernel(experts._product, capability, types, shared | sizes, warps, stages)
        count += 7
    return count


if __name__ == "__main__":
    number = int(sys.argv[1])
    print("compiled", compile_all(number, "bf16", KINDS) + compile_all(number, "fp32", KINDS[-1:]))
