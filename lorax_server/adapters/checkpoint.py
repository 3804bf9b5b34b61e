"""`adapter_model.safetensors`: its header, and the role of each tensor at its module.

The header is read here, not by a library, so that a false one is refused before anything is allocated. Tensors are
named as PEFT names them, today and in older versions: modules may lack the first word of their name or have a wrapper's
in front, and the name of the adapter may stand in the middle.
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
from lorax_server.files.plain_file import Stamp, open_plain, reading
from lorax_server.files.strict_json import parse_json

MAX_HEADER_BYTES = 1 << 22
MAX_KEY_LENGTH = 1000
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Names of early versions of transformers.
RENAMED_MODULES = {"embed_out": "lm_head"}
# Prefixes of module names: PEFT, its users and training libraries wrap models.
WRAPPERS = {"base_model", "model", "module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod"}


class TensorRole(Enum):
    """The use of a tensor at its module."""

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
        """The name of the field of `ModuleWeights`."""
        return self.name.lower()


# `NAME` stands for the name of the adapter, which early versions of PEFT left in.
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
    (None, r"\.lora_velora_embed(NAME)?|\.lora_monteclora_sampler\..*|\.original_module\..*"),  # only for training
    (TensorRole.WEIGHT, r"((\.token_adapter)?\.base_layer|\.modules_to_save(NAME)?)?\.weight"),
    (TensorRole.BIAS, r"(\.base_layer|\.modules_to_save(NAME)?)?\.bias"),
)
PATTERNS = tuple(
    (role, regex.compile(rf"(?P<module>.+?)(?:{pattern.replace('NAME', '[.][^.]+')})"))
    for role, pattern in ROLE_PATTERNS
)

PROJECTION = regex.compile(r"base_model\.vera_([AB])(?:\.[^.]+)?")


@dataclass(frozen=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


def read_header(path: Path, name: str, stamp: Stamp | None = None) -> dict[str, TensorInfo]:
    """Read the tensors of adapter `name`, and hold every claim of the header against the file's size.

    With a `stamp`, only the file that has it is read.
    """
    what = f"adapter {name!r}"
    try:
        with reading(what, path), open_plain(path, stamp) as file:
            size = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise AdapterError(
                    f"{what}: {path.name} is not a safetensors file (its header would have {length} of {size} bytes); "
                    "other formats are never opened"
                )
            header = parse_json(file.read(length))
    except ValueError as error:
        raise AdapterError(f"{what}: {path.name} cannot be read as safetensors: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterError(f"{what}: the metadata of {path.name} is broken")
    if not header:
        raise AdapterError(f"{what}: {path.name} has no tensors")
    tensors = {key: _tensor_info(name, key, value, 8 + length, size) for key, value in header.items()}
    _check_layout(name, tensors, 8 + length, size)
    return tensors


def _tensor_info(name: str, key: str, value: Any, data_start: int, size: int) -> TensorInfo:
    if len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise AdapterError(f"adapter {name!r}: tensor {key[:80]!r}... has a name that no tensor has")
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        is_plain = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        is_plain = is_plain and all(type(number) is int and 0 <= number <= size for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has a broken header entry: {error}") from error
    if not is_plain or data_start + stop > size or start > stop:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has a broken header entry")
    if dtype not in DTYPE_BYTES:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} is {dtype[:32]}; only float16 to float64 is supported")
    if math.prod(shape) * DTYPE_BYTES[dtype] != stop - start:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} of shape {shape} does not have {stop - start} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_layout(name: str, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Refuse tensors that overlap or leave gaps."""
    end = data_start
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            raise AdapterError(f"adapter {name!r}: tensor {key!r} overlaps another or leaves a gap in the file")
        end = info.stop
    if end != size:
        raise AdapterError(f"adapter {name!r}: the file has {size - end} bytes that belong to no tensor")


def assign_tensors(
    keys: Iterable[str], modules: Iterable[str], name: str
) -> tuple[dict[str, dict[TensorRole, str]], dict[str, str]]:
    """Return the keys of each module of the base model by role, and the adapter's own names for these modules.

    The patterns of an adapter's config speak of its own names. A key without a meaning is an error.
    """
    base_modules = set(modules)
    assigned: dict[str, dict[TensorRole, str]] = {}
    own_names: dict[str, str] = {}
    for key in sorted(keys):
        role, own_name = _split(key, name)
        if role is None:
            continue
        module = _find_module(own_name, base_modules)
        if module is None:
            raise AdapterError(
                f"adapter {name!r}: tensor {key!r} is for a module that this base model does not have, or that "
                "adapters cannot change"
            )
        own_name = own_name.removeprefix("base_model.model.")
        own_names.setdefault(module, own_name)
        roles = assigned.setdefault(module, {})
        other = roles.setdefault(role, key)
        if other != key and _is_copy(other) == _is_copy(key):
            raise AdapterError(f"adapter {name!r}: tensors {other!r} and {key!r} are the same thing")
        if own_names[module] != own_name:
            raise AdapterError(f"adapter {name!r}: tensor {key!r} and others name module {module!r} in two ways")
        if _is_copy(other):  # PEFT saves some tensors a second time, and does not read that copy
            roles[role] = key
    return assigned, own_names


def find_projections(keys: Iterable[str], name: str) -> dict[str, str]:
    """Return the keys of the matrices "A" and "B" that all modules of VeRA share, where a file has them."""
    found: dict[str, str] = {}
    for key in sorted(keys):
        match = PROJECTION.fullmatch(key)
        if match is not None and found.setdefault(match[1], key) != key:
            raise AdapterError(f"adapter {name!r}: tensors {found[match[1]]!r} and {key!r} are the same thing")
    return found


def _is_copy(key: str) -> bool:
    return ".modules_to_save." in key


def _split(key: str, name: str) -> tuple[TensorRole | None, str]:
    for role, pattern in PATTERNS:
        match = pattern.fullmatch(key)
        if match is not None:
            return role, match["module"]
    raise AdapterError(f"adapter {name!r}: tensor {key!r} is nothing we know, so it may change the result")


def _find_module(own_name: str, base_modules: set[str]) -> str | None:
    """Return the module that a name in a file means: itself, with wrappers in front, or without its first words."""
    words = own_name.split(".")
    while True:
        rest = ".".join(words)
        rest = RENAMED_MODULES.get(rest, rest)
        if rest in base_modules:
            return rest
        if len(words) == 1 or words[0] not in WRAPPERS:
            break
        words = words[1:]
    longer = [module for module in base_modules if module.endswith(f".{rest}")]
    return longer[0] if len(longer) == 1 else None
