"""Parses the header of `adapter_model.safetensors`, and maps its tensors to modules and roles.

The header is validated before any memory is allocated. Tensor names of current and older PEFT versions are supported:
module names may have wrapper prefixes or lack leading components, and may contain the adapter name.
"""

import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import regex

from lorax_server.errors import AdapterError
from lorax_server.files.model_files import LFS_POINTER_PREFIX, describe_truncation, find_header_truncation
from lorax_server.files.regular_file import Stamp, convert_read_errors, open_regular_file
from lorax_server.files.strict_json import parse_json

MAX_HEADER_BYTES = 1 << 24  # adapters with a module per expert have tens of thousands of tensors
MAX_FILE_BYTES = 1 << 50  # larger offsets mean that the file is damaged, not truncated
MAX_KEY_LENGTH = 1000
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Module names in early transformers versions.
RENAMED_MODULES = {"embed_out": "lm_head"}
LEGACY_MOE_MODULE, MOE_MODULE = ".block_sparse_moe.", ".mlp."  # Mixtral's name in transformers 4, and in transformers 5
# Module name prefixes added by PEFT and training libraries.
WRAPPER_PREFIXES = {"base_model", "model", "module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod"}


class TensorRole(Enum):
    """An adapter tensor's role in its module. The values are the names that PEFT uses."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    DIAGONAL = "lora_diag"
    IA3 = "ia3_l"
    VERA_B = "vera_lambda_b"
    VERA_D = "vera_lambda_d"
    TUNED_WEIGHT = "ln_tuning_layers.weight"
    TUNED_BIAS = "ln_tuning_layers.bias"
    TOKEN_ROWS = "trainable_tokens_delta"
    WEIGHT = "weight"
    BIAS = "bias"

    @property
    def field(self) -> str:
        """Return the name of the `ModuleWeights` field for this role."""
        return self.name.lower()


# `NAME` is the adapter name, which early PEFT versions did not remove from tensor names.
ROLE_PATTERNS = (
    (TensorRole.LORA_A, r"\.lora_A(NAME)?\.weight|\.lora_embedding_A(NAME)?"),
    (TensorRole.LORA_B, r"\.lora_B(NAME)?\.weight|\.lora_embedding_B(NAME)?"),
    (TensorRole.LORA_BIAS, r"\.lora_B(NAME)?\.bias"),
    (TensorRole.MAGNITUDE, r"\.lora_magnitude_vector(NAME)?(\.weight)?"),
    (TensorRole.DIAGONAL, r"\.lora_diag(NAME)?"),
    (TensorRole.IA3, r"\.ia3_l(NAME)?"),
    (TensorRole.VERA_B, r"\.vera_lambda_b(NAME)?"),
    (TensorRole.VERA_D, r"\.vera_lambda_d(NAME)?"),
    (TensorRole.TUNED_WEIGHT, r"\.ln_tuning_layers(NAME)?\.weight"),
    (TensorRole.TUNED_BIAS, r"\.ln_tuning_layers(NAME)?\.bias"),
    (TensorRole.TOKEN_ROWS, r"(\.token_adapter)?\.trainable_tokens_delta(NAME)?"),
    (None, r"\.lora_velora_embed(NAME)?|\.lora_monteclora_sampler\..*|\.original_module\..*"),  # used only for training
    (TensorRole.WEIGHT, r"((\.token_adapter)?\.base_layer|\.modules_to_save(NAME)?)?\.weight"),
    (TensorRole.BIAS, r"(\.base_layer|\.modules_to_save(NAME)?)?\.bias"),
)
KEY_PATTERNS = tuple(
    (role, regex.compile(rf"(?P<module>.+?)(?:{pattern.replace('NAME', '[.][^.]+')})"))
    for role, pattern in ROLE_PATTERNS
)

# A parameter for all experts of a layer, which PEFT stores if `modules_to_save` names the experts.
EXPERTS_KEY = regex.compile(r".+\.experts(?:\.modules_to_save\.[^.]+)?\.(?:gate_up|down)_proj(?:_bias)?")
PROJECTION_KEY = regex.compile(r"base_model\.vera_([AB])(?:\.[^.]+)?")


@dataclass(frozen=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    stop: int


def read_header(path: Path, name: str, stamp: Stamp | None = None) -> dict[str, TensorInfo]:
    """Return a map from tensor names to metadata, after checking it against the file size. `name` is the adapter name.

    If `stamp` is set, raise SourceError if the file has changed since the stamp was read.
    """
    label = f"adapter {name!r}"
    try:
        with convert_read_errors(label, path), open_regular_file(path, stamp) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(LFS_POINTER_PREFIX))
            if problem := find_header_truncation(start, size, MAX_HEADER_BYTES):
                raise AdapterError(f"{label}: {path.name}: {problem}")
            length = struct.unpack("<Q", start[:8])[0]
            file.seek(8)
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise AdapterError(
                    f"{label}: {path.name} is not a safetensors file (header length {length}, file size {size}); "
                    "other formats are not supported"
                )
            header = parse_json(file.read(length))
    except ValueError as error:
        raise AdapterError(f"{label}: {path.name} cannot be read as safetensors: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterError(f"{label}: {path.name} has invalid metadata")
    if not header:
        raise AdapterError(f"{label}: {path.name} has no tensors")
    if (needed_bytes := 8 + length + _find_data_end(header)) > size:
        raise AdapterError(f"{label}: {path.name}: {describe_truncation(size, needed_bytes)}")
    tensors = {key: _parse_tensor_info(name, key, value, 8 + length, size) for key, value in header.items()}
    _check_layout(name, tensors, 8 + length, size)
    return tensors


def _find_data_end(header: Mapping[str, Any]) -> int:
    """Return the last tensor's end offset, relative to the end of the header. Invalid entries are ignored."""
    offsets: list[Any] = [entry.get("data_offsets") for entry in header.values() if isinstance(entry, dict)]
    return max((pair[1] for pair in offsets if _is_range(pair)), default=0)


def _is_range(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
    return is_pair and 0 <= pair[0] <= pair[1] <= MAX_FILE_BYTES


def _parse_tensor_info(name: str, key: str, value: Any, data_start: int, size: int) -> TensorInfo:
    if len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise AdapterError(f"adapter {name!r}: tensor {key[:80]!r}... has an invalid name")
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        is_valid = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        is_valid = is_valid and all(type(number) is int and 0 <= number <= size for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has an invalid header entry: {error}") from error
    if not is_valid or data_start + stop > size or start > stop:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has an invalid header entry")
    if dtype not in DTYPE_BYTES:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} is {dtype[:32]}; only float16 to float64 are supported")
    if math.prod(shape) * DTYPE_BYTES[dtype] != stop - start:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} of shape {shape} does not have {stop - start} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_layout(name: str, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Reject overlapping tensors and gaps between tensors."""
    end = data_start
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            raise AdapterError(f"adapter {name!r}: tensor {key!r} overlaps another or leaves a gap in the file")
        end = info.stop
    if end != size:
        raise AdapterError(f"adapter {name!r}: the file has {size - end} bytes after its last tensor")


def assign_tensors(
    keys: Iterable[str], modules: Iterable[str], name: str
) -> tuple[dict[str, dict[TensorRole, str]], dict[str, str]]:
    """Return the tensor keys by base model module and role, and the checkpoint's name for each module.

    The checkpoint's names are returned because patterns in the adapter config refer to them. Raise AdapterError for
    unknown keys.
    """
    base_modules = set(modules)
    assigned: dict[str, dict[TensorRole, str]] = {}
    checkpoint_names: dict[str, str] = {}
    for key in sorted(keys):
        role, checkpoint_name = _parse_key(key, name)
        if role is None:
            continue
        module = find_module(checkpoint_name, base_modules)
        if module is None:
            raise AdapterError(
                f"adapter {name!r}: tensor {key!r} targets a module that this base model does not have or that "
                "does not support adapters"
            )
        checkpoint_name = checkpoint_name.removeprefix("base_model.model.")
        checkpoint_names.setdefault(module, checkpoint_name)
        roles = assigned.setdefault(module, {})
        other = roles.setdefault(role, key)
        if other != key and _is_modules_to_save_key(other) == _is_modules_to_save_key(key):
            raise AdapterError(f"adapter {name!r}: tensors {other!r} and {key!r} are duplicates")
        if checkpoint_names[module] != checkpoint_name:
            raise AdapterError(f"adapter {name!r}: tensor {key!r} uses a second name for module {module!r}")
        if _is_modules_to_save_key(other):  # PEFT writes some tensors twice and ignores the `modules_to_save` copy
            roles[role] = key
    return assigned, checkpoint_names


def find_projections(keys: Iterable[str], name: str) -> dict[str, str]:
    """Return the keys of VeRA's shared matrices "A" and "B", if the file contains them."""
    projections: dict[str, str] = {}
    for key in sorted(keys):
        match = PROJECTION_KEY.fullmatch(key)
        if match is not None and projections.setdefault(match[1], key) != key:
            raise AdapterError(f"adapter {name!r}: tensors {projections[match[1]]!r} and {key!r} are duplicates")
    return projections


def _is_modules_to_save_key(key: str) -> bool:
    return ".modules_to_save." in key


def _parse_key(key: str, name: str) -> tuple[TensorRole | None, str]:
    for role, pattern in KEY_PATTERNS:
        match = pattern.fullmatch(key)
        if match is not None:
            return role, match["module"]
    if EXPERTS_KEY.fullmatch(key):
        raise AdapterError(
            f"adapter {name!r}: tensor {key!r} replaces the weights of experts (`modules_to_save`), which is not "
            "supported; train the experts with LoRA (`target_parameters`)"
        )
    raise AdapterError(f"adapter {name!r}: tensor {key!r} is unknown and may change the result")


def find_module(checkpoint_name: str, base_modules: set[str]) -> str | None:
    """Return the base model module for a module name in a checkpoint, or None. Wrapper prefixes and missing leading
    components in the name are ignored.
    """
    words = checkpoint_name.split(".")
    while True:
        rest = ".".join(words)
        rest = RENAMED_MODULES.get(rest, rest)
        if rest in base_modules:
            return rest
        if (renamed := rest.replace(LEGACY_MOE_MODULE, MOE_MODULE)) in base_modules:
            return renamed
        if len(words) == 1 or words[0] not in WRAPPER_PREFIXES:
            break
        words = words[1:]
    candidates = [module for module in base_modules if module.endswith(f".{rest}")]
    return candidates[0] if len(candidates) == 1 else None
