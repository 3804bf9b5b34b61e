"""Uploads of adapter weights to a server with a real engine: each response has the tokens of exactly one version."""

import random
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.e2e.http_server import HttpResponse, Server, serving, write_model, write_variant_adapter

ADMIN = {"authorization": "Bearer admin"}
PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    write_model(folder)
    write_variant_adapter(folder / "adapters" / "first", folder / "adapters" / "variant")
    flags = ("--admin-key", "admin", "--adapter-uploads-dir", str(folder / "uploads"))
    with serving(folder, *flags) as server:
        yield server


def generate(server: Server, name: str, count: int = 8) -> tuple[str, str]:
    """Return the identity of the adapter that a request used, and its text."""
    body = {"inputs": PROMPT, "parameters": {"adapter_id": name, "max_new_tokens": count, "ignore_eos_token": True}}
    response = server.post("/generate", body)
    assert response.status == 200, response.body
    return response.headers["x-adapter-hash"], response.json["generated_text"]


def put(server: Server, name: str, weights: bytes, query: str = "") -> HttpResponse:
    headers = {**ADMIN, "content-type": "application/octet-stream"}
    return server.send("PUT", f"/v1/adapters/{name}/weights{query}", weights, headers)


def weights_of(folder: Path, name: str) -> bytes:
    return (folder / "adapters" / name / "adapter_model.safetensors").read_bytes()


def stored_folders(folder: Path) -> list[str]:
    return [each.name for each in (folder / "uploads").iterdir() if each.is_dir()]


def test_interleaved_updates_and_requests(server: Server, folder: Path) -> None:
    expected = [generate(server, name) for name in ("first", "variant")]
    texts, weights = dict(expected), [weights_of(folder, name) for name in ("first", "variant")]
    assert len(set(texts.values())) == 2
    rng = random.Random(0)
    with ThreadPoolExecutor(4) as threads:
        pending = []
        for _ in range(12):
            pending += [threads.submit(generate, server, "first") for _ in range(4)]
            number = rng.randrange(2)
            assert put(server, "first", weights[number], rng.choice(["", "?running=finish"])).status == 200
            identity, text = generate(server, "first")
            assert (identity, text) == expected[number]
        for each in pending:
            identity, text = each.result()
            assert texts[identity] == text
    assert generate(server, "variant") == expected[1]
    server.send("POST", "/v1/adapters/unload", {"adapter_id": "first"}, ADMIN)
    assert stored_folders(folder) == []
    assert generate(server, "first") == expected[0]


def test_running_request_moves(server: Server, folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(generate, server, "first", 60)
        assert put(server, "first", weights_of(folder, "variant"), "?running=move").status == 200
        assert len(running.result()[1]) > 0
    assert generate(server, "first") == generate(server, "variant")
    server.send("POST", "/v1/adapters/unload", {"adapter_id": "first"}, ADMIN)


def test_vllm_load_route_replaces_an_adapter_in_place(server: Server, folder: Path) -> None:
    """A trainer writes new weights to the same folder, and loads them again."""
    expected = [generate(server, name)[1] for name in ("first", "variant")]
    path, body = folder / "adapters" / "policy", {"lora_name": "policy-lora", "lora_path": "policy"}
    shutil.copytree(folder / "adapters" / "first", path)
    assert server.send("POST", "/v1/load_lora_adapter", body, ADMIN).status == 200
    assert generate(server, "policy-lora")[1] == expected[0]
    (path / "adapter_model.safetensors").write_bytes(weights_of(folder, "variant"))
    assert server.send("POST", "/v1/load_lora_adapter", body | {"load_inplace": True}, ADMIN).status == 200
    assert generate(server, "policy-lora")[1] == expected[1]
    assert server.send("POST", "/v1/unload_lora_adapter", {"lora_name": "policy-lora"}, ADMIN).status == 200


def make_invalid(what: str, weights: bytes, folder: Path) -> bytes:
    tensors: dict[str, Any] = load_file(folder / "adapters" / "first" / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    changes = {
        "NaN": torch.full_like(tensors[name], torch.nan),
        "rank": torch.zeros(tensors[name].shape[0] + 1, tensors[name].shape[1]),
        "shape": torch.zeros(tensors[name].shape[0], tensors[name].shape[1] + 1),
    }
    if what in changes:
        return save({**tensors, name: changes[what]})
    return {
        "empty": b"",
        "truncated": weights[: len(weights) // 2],
        "huge header": struct.pack("<Q", 2**60) + weights[8:],
        "other file": b"PK\x03\x04" + bytes(1000),
        "another base model": save({"base_model.model.other.lora_A.weight": torch.zeros(4, 8)}),
    }[what]


@pytest.mark.parametrize(
    "what", ["empty", "truncated", "huge header", "other file", "NaN", "rank", "shape", "another base model"]
)
def test_invalid_weights_are_rejected_and_the_old_version_stays(what: str, server: Server, folder: Path) -> None:
    before = generate(server, "first")
    response = put(server, "first", make_invalid(what, weights_of(folder, "first"), folder))
    assert response.status == 400, response.body
    assert response.json["error"]["message"].startswith("adapter 'first'")
    assert stored_folders(folder) == []
    assert generate(server, "first") == before
