"""Extracts the routing key from a request body. Invalid requests may go to any replica, which rejects them."""

from collections.abc import Collection
from typing import Any

import msgspec

from lorax_server.scale.placement import RoutingKey, hash_name

PREFIX_BYTES = 512  # shorter prompts are not routed by prefix
GENERATION_PATHS = ("/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")


class _Parameters(msgspec.Struct):
    adapter_id: Any = None
    merged_adapters: Any = None


class _Body(_Parameters):
    """Routing fields of LoRAX, OpenAI and admin requests. The decoder skips other fields."""

    model: Any = None
    inputs: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    parameters: _Parameters | None = None
    lora_name: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def read_routing_key(path: str, content: bytes | bytearray, base_names: Collection[str]) -> RoutingKey:
    """Return hashes of the adapter name and the prompt prefix."""
    try:
        body = _decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not JSON, not UTF-8, nested too deeply
        return RoutingKey()
    name = _find_adapter(body, base_names)
    prompt = bytes(body.messages or body.prompt or body.inputs) if path in GENERATION_PATHS else b""
    prefix = hash_name(prompt[:PREFIX_BYTES].decode(errors="replace")) if len(prompt) >= PREFIX_BYTES else 0
    return RoutingKey(hash_name(name) if name else 0, prefix)


def _find_adapter(body: _Body, base_names: Collection[str]) -> str:
    parameters = body.parameters or _Parameters()
    merged = parameters.merged_adapters or body.merged_adapters
    if isinstance(merged, dict) and isinstance(merged.get("ids"), list):
        return ",".join(map(str, merged["ids"]))
    names = (parameters.adapter_id, body.adapter_id, body.lora_name, body.model)
    name = next((name for name in names if isinstance(name, str) and name), "")
    if name in base_names:
        return ""
    return next((name.removeprefix(f"{base}:") for base in base_names if name.startswith(f"{base}:")), name)
