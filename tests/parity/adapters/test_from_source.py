"""End to end: PEFT saves an adapter, a hub serves it, and a request's logits match PEFT."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.adapters.config import check_base_model, parse_config
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterSources
from lorax_server.errors import AdapterError
from lorax_server.layers.targets import collect_adapter_targets
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.paged import PagedDriver
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.served import load_adapters, make_model, open_adapter
from tests.parity.oracle import oracle_logits

hub_source = pytest.importorskip("lorax_server.adapters.sources.hub", reason="needs httpx2, which this machine lacks")
IDS = list(range(5, 20))


def check_config(config: Mapping[str, Any], base_model_type: Callable[[str], str | None]) -> None:
    parsed = parse_config(config, "tested")
    result = None if parsed.base_model_name is None else base_model_type(parsed.base_model_name)
    check_base_model(parsed, "llama", "LlamaForCausalLM", result)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def files_of(folder: Path, **changes: Any) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    config = json.loads(files["adapter_config.json"]) | changes
    return files | {"adapter_config.json": json.dumps(config).encode()}


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("name", ["everything", "plain"])
def test_hub_and_folder_adapters_match_peft(name: str, tmp_path: Path, device: torch.device) -> None:
    case = CASES[name]
    case.write(tmp_path / "made")
    with running(HubServer()) as server:
        server.repos["owner/base"] = Repo({"README.md": b"a model"}, model_type="llama")
        server.repos["owner/adapter"] = Repo(files_of(tmp_path / "made", base_model_name_or_path="owner/base"))
        sources = AdapterSources(
            {"hub": hub_source.HubSource(tmp_path / "cache", server.url), "local": LocalSource([tmp_path])},
            max_bytes=2**30,
        )
        fetched = [
            sources.fetch("hub", "owner/adapter", None, check_config),
            sources.fetch("local", "made", None, check_config),
        ]
    model = make_model(case.base, device)
    targets = collect_adapter_targets(model)
    # Equal content has equal identities, independent of source and base model name.
    assert len({open_adapter(actual.folder, targets).compute_identity() for actual in fetched}) == 1
    arena = load_adapters(model, [fetched[0].folder], device)
    driver = PagedDriver(model)
    logits = driver.forward([(driver.add(1, len(IDS)), IDS)], arena)[0]
    expected = oracle_logits(case.oracle(tmp_path / "made").to(device), IDS, len(IDS), {})
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {}, "'owner/base', which has model_type 'gpt2'"),
        (None, {"auto_mapping": {"base_model_class": "GPT2LMHeadModel"}}, "trained on a GPT2LMHeadModel"),
        ("llama", {"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ("llama", {"peft_type": "LOHA"}, "peft_type"),
    ],
)
def test_unsupported_adapter_is_rejected_before_download(
    model_type: str | None, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    CASES["plain"].write(tmp_path / "made")
    with running(HubServer()) as server:
        server.repos["owner/base"] = Repo({"README.md": b"a model"}, model_type=model_type)
        server.repos["owner/adapter"] = Repo(
            files_of(tmp_path / "made", base_model_name_or_path="owner/base", **changes)
        )
        source = hub_source.HubSource(tmp_path / "cache", server.url)
        with pytest.raises(AdapterError, match=reason):
            AdapterSources({"hub": source}, max_bytes=2**30).fetch("hub", "owner/adapter", None, check_config)
        assert not any("safetensors" in request.path for request in server.seen)
