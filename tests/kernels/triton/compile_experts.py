"""Compiles the kernels for mixtures of experts for a compute capability, and prints the number of kernels."""

import sys
from typing import Any

from lorax_server.kernels.triton import experts, gated_activation, router
from tests.kernels.triton.compile_quantized import compile_kernel

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
INT32 = ("num_pairs", "num_targets", "first_target", "padded_rank")
LAYERS = [(HIDDEN, 2 * INNER, 2), (INNER, HIDDEN, 1)]  # inputs, outputs, targets


def compile_experts(capability: int, dtype: str) -> int:
    size, count = {"bf16": 2, "fp32": 4}[dtype], 0
    names = "out", "x", "buffer", "matrices", "scales", "offsets", "levels", "biases"
    types = dict.fromkeys(names, f"*{dtype}") | {"v": "*fp32", "table": "*i64", "chosen": "*i64"}
    types |= dict.fromkeys(("order", "starts", "adapters"), "*i32") | dict.fromkeys(INT32, "i32")
    lora_types = types | {"scales": "*fp32"}
    shared = {"EXPERTS": NUM_EXPERTS, "TOP_K": TOP_K, "INTERPRETED": False}
    for inputs, outputs, slices in LAYERS:
        block_k, width = experts.SHRINK_BYTES // size, outputs // slices
        all_tiles = [experts.DECODE_TILES, experts.SHORT_TILES, experts.LONG_TILES]
        for tiles in all_tiles + [experts.WIDE_TILES] * (size == 2 and capability == 90):
            sizes = shared | {"BLOCK_E": NUM_EXPERTS, "HEIGHT": tiles.height}
            product = {"HAS_BIAS": True, "OUTPUTS": outputs, "BLOCK_N": tiles.block_n, "GATHERS": slices == 2}
            product |= experts.PLAIN | {"INPUTS": inputs, "BLOCK_K": tiles.input_bytes // size}
            compile_kernel(experts._product, capability, types, sizes | product, tiles.num_warps, tiles.num_stages)
            shrink = {"SLICES": slices, "INPUTS": inputs, "BLOCK_K": block_k, "GATHERS": slices == 2}
            expand: dict[str, Any] = {"SLICES": slices, "WIDTH": width}
            if tiles is experts.DECODE_TILES:
                sizes = shared | {"HEIGHT": tiles.height, "PARTS": -(-inputs // experts.DECODE_PART_INPUTS)}
                expand["BLOCK_N"] = experts.DECODE_BLOCK_N
                compile_kernel(experts._shrink_groups, capability, lora_types, sizes | shrink, 2, 4)
                compile_kernel(experts._expand_groups, capability, lora_types, sizes | expand, 4, 2)
            else:
                expand["BLOCK_N"] = experts.EXPAND_BLOCK_N
                compile_kernel(experts._shrink, capability, lora_types, sizes | shrink, 4, 3)
                compile_kernel(experts._expand, capability, lora_types, sizes | expand, 4, 2)
            count += 3
    return count


def compile_routers(capability: int, dtype: str) -> int:
    types = {"experts": "*i64", "weights": "*fp32", "logits": f"*{dtype}", "biases": "*fp32", "scale": "fp32"}
    plain: dict[str, Any] = {
        "HAS_BIAS": False,
        "EXPERTS": NUM_EXPERTS,
        "BLOCK": NUM_EXPERTS,
        "TOP_K": TOP_K,
        "TOP_K_BLOCK": TOP_K,
    }
    plain |= {"IS_SOFTMAX": True, "GROUPS": 1, "GROUP_BLOCK": 1, "TOP_GROUPS": 1, "SCORES_PER_GROUP": 1}
    plain |= {"NORMALIZE": True, "MIN_SUM": 1e-20}
    groups = {"HAS_BIAS": True, "EXPERTS": 160, "BLOCK": 256, "TOP_K": 6, "IS_SOFTMAX": False}
    groups |= {"GROUPS": 8, "GROUP_BLOCK": 8, "TOP_GROUPS": 3, "SCORES_PER_GROUP": 2}
    for constants in (plain, plain | groups):
        compile_kernel(router._route, capability, types, constants, 1, 3)
    return 2


def compile_gate(capability: int, dtype: str) -> int:
    types = {"out": f"*{dtype}", "gate_up": f"*{dtype}", "num_rows": "i32", "alpha": "fp32", "limit": "fp32"}
    sizes = {"HEIGHT": gated_activation.BASE_HEIGHT, "BLOCK_N": gated_activation.BASE_BLOCK_N, "WIDTH": INNER}
    constants = sizes | {"ACTIVATION": gated_activation.CLAMPED_SWIGLU}
    compile_kernel(gated_activation._gate, capability, types, constants, 4, 3)
    return 1


def compile_all(capability: int, dtype: str) -> int:
    return compile_experts(capability, dtype) + compile_routers(capability, dtype) + compile_gate(capability, dtype)


if __name__ == "__main__":
    number = int(sys.argv[1])
    print("compiled", compile_all(number, "bf16") + compile_all(number, "fp32"))
