"""Routing keys and merged metrics."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorax_server.scale.ingress import merge_metrics
from lorax_server.scale.placement import RoutingKey, hash_name
from lorax_server.scale.routing_key import PREFIX_BYTES, read_routing_key

BASES = ("base", "alias-of-base")


@pytest.mark.parametrize(
    ("path", "body", "adapter"),
    [
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "poet"}}, "poet"),
        ("/generate", {"inputs": "x"}, ""),
        ("/v1/completions", {"model": "poet", "prompt": "x"}, "poet"),
        ("/v1/completions", {"model": "base", "prompt": "x"}, ""),
        ("/v1/completions", {"model": "alias-of-base", "prompt": ["x", "y"]}, ""),
        ("/v1/chat/completions", {"model": "base:poet", "messages": []}, "poet"),
        ("/v1/chat/completions", {"model": "base", "adapter_id": "poet"}, "poet"),
        ("/generate", {"inputs": "x", "parameters": {"merged_adapters": {"ids": ["a", "b"]}}}, "a,b"),
        ("/v1/adapters/load", {"adapter_id": "poet", "name": "mine"}, "poet"),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "poet"}, "mine"),
        ("/generate", {"inputs": 3, "parameters": {"adapter_id": 5}}, ""),
    ],
)
def test_adapter_hash_is_read_from_all_request_formats(path: str, body: Any, adapter: str) -> None:
    key = read_routing_key(path, json.dumps(body).encode(), BASES)
    assert key == RoutingKey(hash_name(adapter) if adapter else 0)


UNREADABLE = [b"", b"{", b"[]", b"\xff", b'{"parameters": 3}', b"1" * 10_000, b'{"model": "\xff"}']


@pytest.mark.parametrize("body", [*UNREADABLE, b'{"x": ' + b"[" * 200_000])
def test_unreadable_body_has_empty_routing_key(body: bytes) -> None:
    assert read_routing_key("/generate", body, BASES) == RoutingKey()


def test_prompts_with_common_prefix_share_prefix_hash() -> None:
    long = "a system prompt " * 64
    first, second, other, short = (
        read_routing_key("/v1/completions", json.dumps({"model": "base", "prompt": text}).encode(), BASES)
        for text in (long + "one", long + "two", "b" + long, "short")
    )
    assert first == second
    assert first.prefix != other.prefix
    assert short.prefix == 0
    assert len(long) > PREFIX_BYTES


def test_merged_metrics_are_valid() -> None:
    text = (
        "# HELP a_total Things\n# TYPE a_total counter\na_total 1.0\n"
        '# HELP b Others\n# TYPE b gauge\nb{kind="x, }"} 2.0\nb{kind="y"} NaN\n'
    )
    families = {
        family.name: family for family in text_string_to_metric_families(merge_metrics({"r2": text, "r1": text}))
    }
    assert set(families) == {"a", "b"}
    assert [sample.labels for sample in families["a"].samples] == [{"replica": "r1"}, {"replica": "r2"}]
    assert families["b"].samples[0].labels == {"replica": "r1", "kind": "x, }"}
    assert merge_metrics({}) == "\n"
