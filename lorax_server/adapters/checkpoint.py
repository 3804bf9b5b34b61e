"""`adapter_model.safetensors`: its header, and which tensor is what part of which module.

The header is read here, not by a library, so that a file that is not what it says is refused before anything of it is
allocated. Tensors are named as PEFT names them, today and in older versions: modules may lack the first word of their
name or have a wrapper's in front, and the name of the adapter may stand in the middle.
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

from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.plain_file import ChangedError, Stamp, open_plain
from lorax_server.files.strict_json import parse_json

MAX_HEADER_BYTES = 1 << 22
MAX_KEY_LENGTH = 1000
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# What transformers calls otherwise today.
RENAMED_MODULES = {"embed_out": "lm_head"}
# What may stand in front of a module's name: PEFT, its user and training libraries wrap models.
WRAPPERS = {"base_model", "model", "module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod"}


class Part(Enum):
    """What an adapter can have at a module."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    TOKEN_ROWS = "trainable_tokens_delta"
    WEIGHT = "weight"
    BIAS = "bias"


# Where `NAME` stands, early versions of PEFT left the name of the adapter in.
PART_PATTERNS = (
    (Part.LORA_A, r"\.lora_A(NAME)?\.weight|\.lora_embedding_A(NAME)?"),
    (Part.LORA_B, r"\.lora_B(NAME)?\.weight|\.lora_embedding_B(NAME)?"),
    (Part.LORA_BIAS, r"\.lora_B(NAME)?\.bias"),
    (Part.MAGNITUDE, r"\.lora_magnitude_vector(NAME)?(\.weight)?"),
    (Part.TOKEN_ROWS, r"(\.token_adapter)?\.trainable_tokens_delta(NAME)?"),
    (None, r"\.lora_velora_embed(NAME)?|\.lora_monteclora_sampler\..*|\.original_module\..*"),  # only for training
    (Part.WEIGHT, r"((\.token_adapter)?\.base_layer|\.modules_to_save(NAME)?)?\.weight"),
    (Part.BIAS, r"(\.base_layer|\.modules_to_save(NAME)?)?\.bias"),
)
PATTERNS = tuple(
    (part, regex.compile(rf"(?P<module>.+?)(?:{pattern.replace('NAME', '[.][^.]+')})"))
    for part, pattern in PART_PATTERNS
)


@dataclass(frozen=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


def read_header(path: Path, name: str, stamp: Stamp | None = None) -> dict[str, TensorInfo]:
    """The tensors of adapter `name`, after every claim of the header has been held against the file's size. `stamp` is
    that of the file that is meant, if only that one will do."""
    try:
        with open_plain(path, stamp) as file:
            size = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise AdapterError(
                    f"adapter {name!r}: {path.name} is not a safetensors file (its header would have {length} of "
                    f"{size} bytes); other formats are never opened"
                )
            header = parse_json(file.read(length))
    except ChangedError as error:
        raise SourceError(f"adapter {name!r}: {path.name} changed while it was read; try again") from error
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: {path.name} cannot be read as safetensors: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterError(f"adapter {name!r}: the metadata of {path.name} is broken")
    if not header:
        raise AdapterError(f"adapter {name!r}: {path.name} has no tensors")
    tensors = {key: _tensor_info(name, key, value, 8 + length, size) for key, value in header.items()}
    _check_layout(name, tensors, 8 + length, size)
    return tensors


def _tensor_info(name: str, key: str, value: Any, data_start: int, size: int) -> TensorInfo:
    if len(key) > MAX_KEY_LENGTH or not key.isprintable():
        raise AdapterError(f"adapter {name!r}: tensor {key[:80]!r}... has a name that no tensor has")
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        plain = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        plain = plain and all(type(number) is int and 0 <= number <= size for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has a broken header entry: {error}") from error
    if not plain or data_start + stop > size or start > stop:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} has a broken header entry")
    if dtype not in DTYPE_BYTES:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} is {dtype}; only float16 to float64 is supported")
    if math.prod(shape) * DTYPE_BYTES[dtype] != stop - start:
        raise AdapterError(f"adapter {name!r}: tensor {key!r} of shape {shape} does not have {stop - start} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_layout(name: str, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Tensors lie one after the other: no byte belongs to two, none to no one."""
    end = data_start
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            raise AdapterError(f"adapter {name!r}: tensor {key!r} overlaps another or leaves a gap in the file")
        end = info.stop
    if end != size:
        raise AdapterError(f"adapter {name!r}: the file has {size - end} bytes that belong to no tensor")


@dataclass(frozen=True)
class Assigned:
    """The tensors of one module."""

    written: str  # what the adapter calls the module, which is what the patterns of its config speak of
    keys: dict[Part, str]


def assign_tensors(keys: Iterable[str], modules: Iterable[str], name: str) -> dict[str, Assigned]:
    """By module of the base model: which tensor is what. A key that means nothing is an error."""
    known = set(modules)
    assigned: dict[str, Assigned] = {}
    for key in sorted(keys):
        part, written = _split(key, name)
        if part is None:
            continue
        module = _find_module(written, known)
        if module is None:
            raise AdapterError(
                f"adapter {name!r}: tensor {key!r} is for a module that this base model does not have, or that "
                "adapters cannot change"
            )
        parts = assigned.setdefault(module, Assigned(written.removeprefix("base_model.model."), {})).keys
        if part in parts and _is_copy(parts[part]) != _is_copy(key):
            # PEFT writes some of what it saves a second time, and does not read that copy.
            parts[part] = parts[part] if _is_copy(key) else key
            continue
        if part in parts:
            raise AdapterError(f"adapter {name!r}: tensors {parts[part]!r} and {key!r} are the same thing")
        parts[part] = key
    return assigned


def _is_copy(key: str) -> bool:
    return ".modules_to_save." in key


def _split(key: str, name: str) -> tuple[Part | None, str]:
    for part, pattern in PATTERNS:
        found = pattern.fullmatch(key)
        if found is not None:
            return part, found["module"]
    raise AdapterError(f"adapter {name!r}: tensor {key!r} is nothing we know, so it may change the result")


def _find_module(written: str, known: set[str]) -> str | None:
    """The module that a name in a file means: itself, with wrappers in front, or without its first words."""
    words = written.split(".")
    while True:
        rest = ".".join(words)
        rest = RENAMED_MODULES.get(rest, rest)
        if rest in known:
            return rest
        if len(words) == 1 or words[0] not in WRAPPERS:
            break
        words = words[1:]
    longer = [module for module in known if module.endswith(f".{rest}")]
    return longer[0] if len(longer) == 1 else None
