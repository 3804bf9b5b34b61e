"""Reads `quantization_config` from `config.json`, which describes quantized checkpoints. Needs no torch, so that
unsupported formats are rejected right after the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lorax_server.errors import ConfigError

SUPPORTED_METHODS = "compressed-tensors, fp8, fbgemm_fp8, gptq, awq, bitsandbytes"
INTEGER_BITS = (4, 8)
# Bytes per weight of linear layers on a GPU that are quantized while loading, including scales.
LOADED_BYTES = {"int8": 1.125, "int4": 0.625, "fp8": 1.0625, "fp8-dynamic": 1.03, "nf4": 0.5625, "fp4": 0.5625}
# compressed-tensors formats by the kind of values that they store.
PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT = "pack-quantized", "int-quantized", "float-quantized"
COMPRESSED_FORMATS = (PACKED_FORMAT, INTEGER_FORMAT, FLOAT_FORMAT, "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True)
class QuantizationConfig:
    """The storage format of a checkpoint. The tensor names show which matrices are quantized."""

    method: str  # `quant_method`
    bits: tuple[int, ...]  # bits per integer weight; empty for float formats. Several only for compressed-tensors.
    zero_point_offset: int = 0  # GPTQ: added to the stored zero points
    is_symmetric: bool = False  # GPTQ: all zero points are half of the range
    is_reordered: bool = False  # GPTQ: the groups may not consist of consecutive inputs
    group_size: int | None = None  # GPTQ: inputs per scale; None if unknown
    block_size: tuple[int, int] | None = None  # 8-bit floats: outputs and inputs per scale; None for rows or matrices

    @property
    def bytes_per_weight(self) -> float:
        """Return the approximate size of a weight on a GPU, with scales for groups of 128 inputs."""
        if self.is_reordered:
            return 2  # for weights that cannot be kept quantized, which the config does not show
        bits = max(self.bits) if self.bits else 4 if self.method == "bitsandbytes" else 8
        return {4: 0.5625, 8: 1.03}[bits]

    @property
    def has_integers(self) -> bool:
        """Return True if all quantized matrices are integers with scales, which CPUs keep in memory as integers."""
        return bool(self.bits)


def read_quantization_config(stored: Any) -> QuantizationConfig | None:
    """Return the format that a model's `quantization_config` describes, or None if the checkpoint is not quantized.

    Raise `ConfigError` if the format is not supported.
    """
    if not stored:
        return None
    if not isinstance(stored, Mapping):
        raise ConfigError(f"config field quantization_config must be an object (got {stored!r})")
    if isinstance(stored.get("quantization_config"), Mapping):
        stored = {**stored["quantization_config"], **stored}  # in old files
    method = stored.get("quant_method")
    if method is None and (stored.get("load_in_8bit") or stored.get("load_in_4bit")):
        method = "bitsandbytes"  # written by old versions of transformers
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(
            f"the quantization method {method!r} is not supported; supported methods: {SUPPORTED_METHODS}"
        )
    try:
        return _READERS[method](stored)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config field quantization_config cannot be read ({method}): {error}") from error


def _read_gptq(stored: Mapping[str, Any]) -> QuantizationConfig:
    bits = _read_bits("gptq", stored)
    layout = stored.get("checkpoint_format") or stored.get("format") or "gptq"
    if stored.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported("gptq", f"checkpoint_format = {layout!r}; use gptq or gptq_v2")
    if stored.get("pack_dtype", "int32") != "int32":
        raise _unsupported("gptq", f"pack_dtype = {stored['pack_dtype']!r}; use int32")
    for pattern, settings in (stored.get("dynamic") or {}).items():  # settings for the modules with matching names
        if settings.get("bits", bits) != bits:
            raise _unsupported("gptq", f"{settings['bits']} bits for {pattern!r}; use the same bits for all modules")
    group_size = int(stored.get("group_size") or 0)
    return QuantizationConfig(
        "gptq",
        (bits,),
        zero_point_offset=int(layout == "gptq"),
        is_symmetric=bool(stored.get("sym", True)),
        is_reordered=bool(stored.get("desc_act")) and group_size > 0,
        group_size=group_size if group_size > 0 else None,
    )


def _read_awq(stored: Mapping[str, Any]) -> QuantizationConfig:
    layout = next((stored[field] for field in ("version", "format", "checkpoint_format") if stored.get(field)), "gemm")
    layout = str(layout).lower()
    if layout != "gemm":
        raise _unsupported("awq", f"version = {layout!r}; use gemm")
    if (bits := _read_bits("awq", stored)) != 4:
        raise _unsupported("awq", f"bits = {bits}; use 4")
    return QuantizationConfig("awq", (bits,))


def _read_fp8(stored: Mapping[str, Any]) -> QuantizationConfig:
    if stored.get("expert_dtype", "fp8") != "fp8":
        raise _unsupported("fp8", f"expert_dtype = {stored['expert_dtype']!r}; use fp8")
    block = stored.get("weight_block_size")
    return QuantizationConfig("fp8", (), block_size=None if block is None else _read_block_size(block))


def _read_fbgemm_fp8(stored: Mapping[str, Any]) -> QuantizationConfig:  # noqa: ARG001 - its fields do not matter
    return QuantizationConfig("fbgemm_fp8", ())


def _read_bitsandbytes(stored: Mapping[str, Any]) -> QuantizationConfig:
    if stored.get("load_in_8bit"):
        return QuantizationConfig("bitsandbytes", (8,))
    kind = stored.get("bnb_4bit_quant_type", "fp4")
    if not stored.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise _unsupported("bitsandbytes", f"bnb_4bit_quant_type = {kind!r}; use load_in_8bit, nf4 or fp4")
    return QuantizationConfig("bitsandbytes", ())


def _read_compressed_tensors(stored: Mapping[str, Any]) -> QuantizationConfig:
    if stored.get("transform_config"):
        raise _unsupported("compressed-tensors", "transform_config; quantize the model without rotations")
    sparsity = stored.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported("compressed-tensors", f"sparsity_config format = {sparsity['format']!r}; use dense")
    groups = list((stored.get("config_groups") or {}).values())
    for name in (stored.get("format"), *(group.get("format") for group in groups)):
        if name and name not in COMPRESSED_FORMATS:
            raise _unsupported("compressed-tensors", f"format = {name!r}; use {', '.join(COMPRESSED_FORMATS[:4])}")
    bits, has_floats, blocks = set(), False, set()
    for group in groups:
        weights = group.get("weights") or {}
        if weights and weights.get("type", "int") == "float":
            if weights.get("num_bits") != 8:
                raise _unsupported("compressed-tensors", f"{weights.get('num_bits')}-bit floats; use 8 bits")
            has_floats = True
            if weights.get("strategy") == "block":
                blocks.add(_read_block_size(weights.get("block_structure")))
        elif weights:
            bits.add(_read_bits("compressed-tensors", weights, "num_bits"))
    if len(blocks) > 1:
        raise _unsupported("compressed-tensors", "several values of block_structure; use one")
    return QuantizationConfig(
        "compressed-tensors", () if has_floats else tuple(sorted(bits)), block_size=next(iter(blocks), None)
    )


def _read_block_size(block: Any) -> tuple[int, int]:
    outputs, inputs = (int(size) for size in block)
    if min(outputs, inputs) < 1:
        raise ValueError(f"block size {block!r} must contain positive numbers")
    return outputs, inputs


def _read_bits(method: str, stored: Mapping[str, Any], field: str = "bits") -> int:
    bits = stored.get(field)
    if bits not in INTEGER_BITS:
        raise _unsupported(method, f"{field} = {bits!r}; use 4 or 8")
    return int(bits)


def _unsupported(method: str, problem: str) -> ConfigError:
    return ConfigError(f"the quantization method {method} is not supported with {problem}")


_READERS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed_tensors,
}
