"""The part of a request that decides where it goes. One that cannot be read goes anywhere: a server answers it."""

from collections.abc import Collection
from typing import Any

import msgspec

from lorax_server.scale.placement import Wanted, hash_name

PREFIX_BYTES = 512  # of a prompt: shorter ones share little that would have to be computed again
GENERATING = ("/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")


class _Parameters(msgspec.Struct):
    adapter_id: Any = None
    merged_adapters: Any = None


class _Fields(msgspec.Struct):
    """Fields of both surfaces and of the admin's routes. Others are passed over without being read."""

    model: Any = None
    inputs: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    parameters: _Parameters | None = None
    adapter_id: Any = None
    merged_adapters: Any = None
    lora_name: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


def read_wanted(path: str, body: bytes, base_names: Collection[str]) -> Wanted:
    """Return the adapter that a request names, and the beginning of its prompt."""
    if not body:
        return Wanted()
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not JSON, not UTF-8, too deep
        return Wanted()
    name = _find_name(fields, base_names)
    prompt = bytes(fields.messages or fields.prompt or fields.inputs)[:PREFIX_BYTES] if path in GENERATING else b""
    # A short prompt shares nothing worth meeting for.
    prefix = hash_name(prompt.decode(errors="replace")) if len(prompt) == PREFIX_BYTES else 0
    return Wanted(hash_name(name) if name else 0, prefix)


def _find_name(fields: _Fields, base_names: Collection[str]) -> str:
    parameters = fields.parameters or _Parameters()
    merged = parameters.merged_adapters or fields.merged_adapters
    if isinstance(merged, dict) and isinstance(merged.get("ids"), list):
        return ",".join(map(str, merged["ids"]))
    names = (parameters.adapter_id, fields.adapter_id, fields.lora_name, fields.model)
    name = next((name for name in names if isinstance(name, str) and name), "")
    if name in base_names:
        return ""
    base = next((base for base in base_names if name.startswith(f"{base}:")), None)
    return name if base is None else name[len(base) + 1 :]
