"""Writes quantized checkpoints of transformers models, in the formats of published models.

`compressed-tensors` and `bitsandbytes` write and read their own formats here. GPTQ, AWQ and FP8 are written from their
specifications.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn

from tests.models.tiny import change_json

Stored = dict[str, torch.Tensor]  # stored tensors by suffix
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each part of a word


@dataclass(frozen=True)
class Format:
    """`quantize` returns the stored tensors of a matrix, and its dequantized weights in float32."""

    config: Mapping[str, Any]  # `quantization_config`
    quantize: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
    label: str
    is_integer: bool = True  # CPUs keep the weights as integers


@torch.no_grad()
def write_checkpoint(folder: Path, model: Any, name: str, ignored: tuple[str, ...] = ("lm_head",)) -> None:
    """Quantize all linear layers in place, except those with a name in `ignored`, and write a model folder."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tied = model.config.tie_word_embeddings
    tensors = {
        key: value.clone() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    matrices = {
        module_name: module.weight
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(part in module_name for part in ignored)
    }
    for parameter_name, parameter in model.named_parameters():
        if "experts." in parameter_name and parameter.dim() == 3:  # published checkpoints have a matrix per expert
            del tensors[parameter_name]
            prefix, _, fused = parameter_name.rpartition(".")
            names = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
            for expert, stacked in enumerate(parameter):
                matrices |= {
                    f"{prefix}.{expert}.{name}": matrix
                    for name, matrix in zip(names, stacked.chunk(len(names)), strict=True)
                }
    for matrix_name, matrix in matrices.items():
        stored, weights = FORMATS[name].quantize(matrix.detach().contiguous())
        assert weights.shape == matrix.shape
        matrix.copy_(weights)
        tensors.pop(f"{matrix_name}.weight", None)
        tensors |= {f"{matrix_name}.{suffix}": value.contiguous() for suffix, value in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", quantization_config=FORMATS[name].config)


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def _choose_integers(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned integers `[outputs, inputs]`, and float16 scales and zero points `[outputs, groups]`."""
    top, count = 2**bits - 1, int(groups.max()) + 1
    parts = [weight[:, groups == group] for group in range(count)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if is_symmetric else (-low / scales.float()).round().clamp(0, top)
    values = (weight / scales.float()[:, groups] + zeros.float()[:, groups]).round().clamp(0, top)
    return values.int(), scales, zeros.int()


def _pack(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned integers along the last dimension into int32 words, in this order from the lowest bits."""
    order = order or tuple(range(32 // bits))
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // len(order), dtype=torch.int64)
    for place, index in enumerate(order):
        words |= values[..., index :: len(order)].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _shuffle(groups: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """Shuffle the groups of the inputs. By default, all matrices with the same inputs have the same order."""
    generator = torch.Generator().manual_seed(len(groups) if seed is None else seed)
    return groups[torch.randperm(len(groups), generator=generator)]


def _gptq(
    bits: int,
    *,
    version: int = 1,
    is_symmetric: bool = True,
    acts: bool = False,
    group: int = GROUP,
    has_own_order: bool = False,
) -> Format:
    """With `acts`, the groups are shuffled, with `has_own_order` differently for each matrix."""

    def quantize(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // group
        if acts:
            groups = _shuffle(groups, int(1e6 * weight.abs().sum()) if has_own_order else None)
        values, scales, zeros = _choose_integers(weight, groups, bits, is_symmetric)
        stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
        stored = {
            "qweight": _pack(values, bits).t(),
            "qzeros": _pack(stored_zeros.t(), bits),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        return stored, (values - zeros[:, groups]).float() * scales.float()[:, groups]

    config = {
        **{"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": acts, "sym": is_symmetric},
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Format(config, quantize, f"gptq-int{bits}")


def _awq(*, has_zeros: bool = True) -> Format:
    def quantize(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // GROUP
        values, scales, zeros = _choose_integers(weight, groups, 4, is_symmetric=not has_zeros)
        stored = {"qweight": _pack(values.t(), 4, AWQ_ORDER), "scales": scales.t()}
        if has_zeros:
            stored["qzeros"] = _pack(zeros.t(), 4, AWQ_ORDER)
        return stored, (values - zeros[:, groups]).float() * scales.float()[:, groups]

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": has_zeros, "version": "gemm"}
    return Format(config, quantize, "awq-int4")


# --- FP8 --------------------------------------------------------------------------------------------------------------


def _round_to_float8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_blocks(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Quantize in blocks of 48 by 32, which do not divide the number of rows."""
    outputs, inputs = weight.shape
    rows = -(-outputs // 48)
    padded = nn.functional.pad(weight, (0, -inputs % GROUP, 0, rows * 48 - outputs))
    blocks = padded.view(rows, 48, -1, GROUP)
    scales = blocks.abs().amax((1, 3)) / 448 + 1e-9
    wide = scales.repeat_interleave(48, 0).repeat_interleave(GROUP, 1)[:outputs, :inputs]
    values = _round_to_float8(weight, wide)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * wide


def _fp8_matrix(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = _round_to_float8(weight, scale)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return stored, values.float() * scale


def _fp8_rows(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = _round_to_float8(weight, scales)
    return {"weight": values, "weight_scale": scales, "input_scale_ub": torch.tensor(1200.0)}, values.float() * scales


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed_tensors(layout: str, *, activations: dict[str, Any] | None = None, **weights: Any) -> Format:
    """Quantize with the library's compressor, and dequantize with its decompressor."""
    args = QuantizationArgs(**weights)
    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)

    def quantize(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        (outputs, size), strategy = weight.shape, str(args.strategy)
        rows, columns = (outputs, size) if strategy == "tensor" else (1, size)
        if strategy == "group":
            columns = args.group_size
        elif strategy == "block":
            rows, columns = args.block_structure
        parts = weight.view(outputs // rows, rows, size // columns, columns)
        scales, zeros = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), args)
        if strategy == "tensor":
            scales, zeros = scales.flatten(), zeros.flatten()
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        stored = dict(compressor.compress(state, scheme))
        if args.symmetric:
            stored.pop("weight_zero_point", None)
        return stored, compressor.decompress(dict(stored), scheme)["weight"].float()

    config = {
        **{"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]},
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "quantization_status": "compressed",
    }
    is_integer = weights["type"] == "int"
    label = f"compressed-tensors-int{args.num_bits}" if is_integer else "compressed-tensors-fp8"
    return Format(config, quantize, label, is_integer)


def _act_order(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Quantize with activation ordering as older versions of compressed-tensors do."""
    inputs = weight.shape[1]
    groups = _shuffle(torch.arange(inputs) // GROUP)
    values, scales, zeros = _choose_integers(weight, groups, 4, is_symmetric=True)
    stored = {"weight_packed": _pack(values, 4), "weight_scale": scales, "weight_g_idx": groups.int()}
    shape = {"weight_shape": torch.tensor(weight.shape)}
    return stored | shape, (values - zeros[:, groups]).float() * scales.float()[:, groups]


def _unpacked_zeros(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Quantize with zero points that are not packed."""
    groups = torch.arange(weight.shape[1]) // GROUP
    values, scales, zeros = _choose_integers(weight, groups, 4, is_symmetric=False)
    stored = {
        "weight_packed": _pack(values, 4),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
    }
    shape = {"weight_shape": torch.tensor(weight.shape)}
    return stored | shape, (values - zeros[:, groups]).float() * scales.float()[:, groups]


def _change(original: Format, change: Callable[[Stored], object]) -> Format:
    """Return a format that changes the stored tensors of another format."""

    def quantize(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        stored, dequantized = original.quantize(weight)
        change(stored)
        return stored, dequantized

    return replace(original, quantize=quantize)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


def _bitsandbytes_4_bits(kind: str, *, is_nested: bool = False) -> Format:
    def quantize(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        functions: Any = bitsandbytes.functional
        packed, state = functions.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested)
        stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": packed, **stored}, functions.dequantize_4bit(packed, state).float()

    config = {
        **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
        **{"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested},
    }
    return Format(config, quantize, f"bitsandbytes-{kind}", is_integer=False)


def _bitsandbytes_8_bits(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    functions: Any = bitsandbytes.functional
    values, scales, _ = functions.int8_vectorwise_quant(weight.half())
    stored = {"weight": values, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, functions.int8_vectorwise_dequant(values, scales)


INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
DYNAMIC8 = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [16, GROUP]}
FORMATS: dict[str, Format] = {
    "gptq": _gptq(4),
    "gptq-asymmetric": _gptq(4, is_symmetric=False),
    "gptq-act-order": _gptq(4, acts=True, is_symmetric=False),
    "gptq-act-order-int8": _gptq(8, acts=True, group=16),
    "gptq-act-order-per-matrix": _gptq(4, acts=True, has_own_order=True),
    "gptq-act-order-short-group": replace(_gptq(4, acts=True, group=48), is_integer=False),
    "gptq-v2": _gptq(4, version=2, is_symmetric=False),
    "gptq-int8": _gptq(8),
    "gptq-int8-asymmetric": _gptq(8, is_symmetric=False),
    "gptq-group-16": _gptq(4, group=16),
    "awq": _awq(),
    "awq-no-zeros": _awq(has_zeros=False),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [48, GROUP]}, _fp8_blocks, "fp8", is_integer=False
    ),
    "fp8-matrix": Format({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_matrix, "fp8", is_integer=False),
    "fbgemm-fp8": Format({"quant_method": "fbgemm_fp8"}, _fp8_rows, "fbgemm_fp8-fp8", is_integer=False),
    "ct-int4": _compressed_tensors("pack-quantized", **INT4, **GROUPS, symmetric=True),
    "ct-int4-asymmetric": _compressed_tensors("pack-quantized", **INT4, **GROUPS, symmetric=False),
    "ct-int4-tensor": _compressed_tensors("pack-quantized", **INT4, strategy="tensor", symmetric=False),
    "ct-int4-channel": _compressed_tensors("pack-quantized", **INT4, strategy="channel", symmetric=True),
    "ct-int8": _compressed_tensors("pack-quantized", **INT8, **GROUPS, symmetric=True),
    "ct-w8a8": _compressed_tensors(
        "int-quantized", activations=DYNAMIC8 | {"type": "int"}, **INT8, strategy="channel", symmetric=True
    ),
    "ct-w8a8-asymmetric": _compressed_tensors(
        "int-quantized", activations=DYNAMIC8 | {"type": "int"}, **INT8, strategy="channel", symmetric=False
    ),
    "ct-fp8-matrix": _compressed_tensors(
        "float-quantized", activations=DYNAMIC8 | {"type": "float"}, **FLOAT8, strategy="tensor"
    ),
    "ct-fp8-rows": _compressed_tensors(
        "float-quantized", activations=DYNAMIC8 | {"type": "float"}, **FLOAT8, strategy="channel"
    ),
    "ct-fp8-blocks": _compressed_tensors("float-quantized", **FLOAT8, **BLOCKS),
    "nf4": _bitsandbytes_4_bits("nf4"),
    "nf4-double": _bitsandbytes_4_bits("nf4", is_nested=True),
    "fp4": _bitsandbytes_4_bits("fp4"),
    "bitsandbytes-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, _bitsandbytes_8_bits, "bitsandbytes-int8"
    ),
}
FORMATS["ct-int4-act-order"] = replace(FORMATS["ct-int4"], quantize=_act_order)
FORMATS["ct-int4-unpacked-zeros"] = replace(FORMATS["ct-int4-asymmetric"], quantize=_unpacked_zeros)
FORMATS["gptq-zero-g_idx"] = _change(FORMATS["gptq"], lambda stored: stored["g_idx"].zero_())
FORMATS["gptq-short-group"] = replace(_change(_gptq(4, group=48), lambda stored: stored.pop("g_idx")), is_integer=False)
FORMATS["nf4-bfloat16-storage"] = _change(
    FORMATS["nf4"], lambda stored: stored.update(weight=stored["weight"].flatten().view(torch.bfloat16))
)
