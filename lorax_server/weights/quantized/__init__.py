"""Reads quantized checkpoints. Each module reads one format; `group_tensors` finds the quantized matrices."""

from collections.abc import Mapping

from lorax_server.errors import WeightsError
from lorax_server.quantization_config import QuantizationConfig
from lorax_server.weights.quantized.awq import AWQTensor
from lorax_server.weights.quantized.bitsandbytes import Int8Tensor, Packed4BitTensor
from lorax_server.weights.quantized.compressed_tensors import PackedTensor
from lorax_server.weights.quantized.gptq import GPTQTensor
from lorax_server.weights.quantized.scaled import ScaledTensor
from lorax_server.weights.quantized.tensor import QuantizedTensor, ReadTensor, StoredPart

FORMATS: dict[str, tuple[type[QuantizedTensor], ...]] = {
    "awq": (AWQTensor,),
    "bitsandbytes": (Packed4BitTensor, Int8Tensor),
    "compressed-tensors": (PackedTensor, ScaledTensor),
    "fbgemm_fp8": (ScaledTensor,),
    "fp8": (ScaledTensor,),
    "gptq": (GPTQTensor,),
}


def group_tensors(
    tensors: Mapping[str, StoredPart], config: QuantizationConfig, read: ReadTensor
) -> dict[str, StoredPart | QuantizedTensor]:
    """Return the tensors, with one `QuantizedTensor` instead of the stored tensors of each quantized matrix."""
    if config.method == "awq":
        _reject_activation_scales(tensors)
    grouped: dict[str, StoredPart | QuantizedTensor] = dict(tensors)
    for tensor_class in FORMATS[config.method]:
        for name in tensors:
            if not tensor_class.is_main_part(name, tensors):
                continue
            prefix = name.removesuffix(tensor_class.main_part)
            parts = {suffix: prefix + suffix for suffix in tensor_class.find_parts(prefix, tensors)}
            for stored in parts.values():
                grouped.pop(stored, None)
            matrix = tensor_class({suffix: tensors[stored] for suffix, stored in parts.items()}, prefix, config, read)
            grouped[f"{prefix}weight"] = matrix
    return grouped


def _reject_activation_scales(tensors: Mapping[str, StoredPart]) -> None:
    """Raise `WeightsError` if AutoAWQ stored scales for the activation function, as it does for GPT-NeoX and others."""
    for name, stored in tensors.items():
        if name.endswith(".scales") and f"{name.removesuffix('scales')}qweight" not in tensors:
            raise WeightsError(
                f"{getattr(stored, 'path', 'tensors in memory')}: AWQ with scaled activations is not supported "
                f"(tensor {name!r}); use GPTQ or another format for this model"
            )


__all__ = ["QuantizedTensor", "group_tensors"]
