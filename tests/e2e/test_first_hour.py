"""A new user's first steps, with real processes: train, add, query, replace and remove an adapter.

Also covers common problems: broken adapters, unsupported models, and requests without token limits.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.e2e.http_server import Server, ids_of, import_path, serving, with_adapter, write_model
from tests.parity.oracle import oracle_greedy

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
NEW_TOKENS = 8
WAIT_S = 120  # only failing tests wait this long
DAY = {
    "type": "object",
    "properties": {"day": {"enum": ["Monday", "Tuesday"]}},
    "required": ["day"],
    "additionalProperties": False,
}


class User:
    """A user with a model folder, a running server, OpenAI's client and the command line."""

    def __init__(self, folder: Path, server: Server, base: Any) -> None:
        self.folder, self.server, self.base = folder, server, base
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def train(self, seed: int, base_name: str = "model") -> Path:
        """Train a LoRA adapter with PEFT for a few steps, and return its folder."""
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
        tokens = torch.randint(10, 200, (2, 12))
        for _ in range(8):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        out = self.folder / f"trained-{seed}"
        model.save_pretrained(out)
        config = json.loads((out / "adapter_config.json").read_text())
        (out / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base_name}))
        return out

    def install(self, trained: Path, name: str) -> Path:
        """Put a trained adapter into the adapter folder, in place of an earlier one."""
        target = self.folder / "adapters" / name
        staged = self.folder / f"staged-{name}"
        shutil.copytree(trained, staged)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staged, target)
        return target

    def complete(self, adapter: str | None) -> list[int]:
        """Return the greedy tokens of a completion."""
        parameters: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos_token": True}
        if adapter is not None:
            parameters["adapter_id"] = adapter
        reply = self.server.post("/generate", {"inputs": PROMPT, "parameters": parameters})
        assert reply.status == 200, reply.body
        return [token["id"] for token in reply.json["details"]["tokens"]]

    def expected_tokens(self, adapter: Path | None) -> list[int]:
        """Return the greedy tokens from transformers and PEFT."""
        model = self.base if adapter is None else with_adapter(self.base, adapter)
        tokens = oracle_greedy(model, ids_of([PROMPT])[0], NEW_TOKENS, {})
        assert len(tokens) > NEW_TOKENS // 2  # up to a near tie
        return tokens

    def agrees(self, name: str | None, adapter: Path | None) -> bool:
        expected = self.expected_tokens(adapter)
        return self.complete(name)[: len(expected)] == expected

    def run(self, *arguments: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a `lorax` command against the server."""
        return run_lorax(*arguments, text=text, LORAX_URL=self.server.url)

    def list_names(self) -> list[str]:
        return [model.id for model in self.openai.models.list()]


def run_lorax(*arguments: str, text: str | None = None, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lorax_server.cli", *arguments],
        input=text,
        env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("first-hour")
    base = write_model(folder)
    shutil.rmtree(folder / "adapters")
    (folder / "adapters").mkdir()
    with serving(folder, "--tool-parser", "hermes", "--describe-tools", "false", from_scratch=True) as server:
        user = User(folder, server, base)
        yield user
        user.openai.close()
        processes = psutil.Process(server.process.pid).children()
        titles = {" ".join(process.cmdline()).strip() for process in processes}
        assert "lorax: engine" in titles
        assert server.stop() == 0
        assert not [line for line in server.log if "ERROR" in line or "Traceback" in line]


def test_adapter_can_be_trained_added_replaced_and_removed(user: User) -> None:
    assert user.list_names() == ["model"]  # the name of the model's folder
    assert user.agrees(None, None)
    first, second = user.train(1), user.train(2)

    user.install(first, "pirate")
    wait_until(lambda: "pirate" in user.list_names())
    assert user.agrees("pirate", first)
    assert not user.agrees("pirate", None)
    assert user.openai.chat.completions.create(model="pirate", messages=MESSAGES, max_tokens=4).model == "pirate"

    user.install(second, "pirate")
    wait_until(lambda: user.agrees("pirate", second))

    shutil.rmtree(user.folder / "adapters" / "pirate")
    wait_until(lambda: "pirate" not in user.list_names())
    with pytest.raises(openai.NotFoundError, match="'pirate' does not exist"):
        user.openai.completions.create(model="pirate", prompt=PROMPT)
    assert user.agrees(None, None)


def test_broken_adapter_error_states_reason(user: User) -> None:
    folder = user.install(user.train(3), "broken")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    wait_until(lambda: "broken" in user.list_names())
    with pytest.raises(openai.BadRequestError, match=r"the file has \d+ bytes.*was the copy interrupted\?"):
        user.openai.completions.create(model="broken", prompt=PROMPT)
    assert "was the copy interrupted?" in user.run("adapters").stdout
    assert user.server.post("/generate", {"inputs": "a", "parameters": {"adapter_id": "broken"}}).status == 424


def test_adapter_for_another_base_model_is_served_with_warning(user: User) -> None:
    trained = user.train(4, base_name="owner/another-model")
    user.install(trained, "foreign")
    wait_until(lambda: "foreign" in user.list_names())
    assert user.agrees("foreign", trained)
    reply = user.server.post("/v1/completions", {"model": "foreign", "prompt": PROMPT, "max_tokens": 2})
    warning = "adapter 'foreign' was trained on 'owner/another-model'"
    assert reply.headers["x-adapter-warning"].startswith(warning)
    assert [line for line in user.server.log if warning in line]
    listed = user.server.send("GET", "/v1/adapters").json["data"]
    assert next(adapter["warning"] for adapter in listed if adapter["id"] == "foreign").startswith(warning)


def test_adapter_is_loaded_and_unloaded_without_admin_key(user: User) -> None:
    user.install(user.train(5), "loaded")
    wait_until(lambda: "loaded" in user.list_names())
    assert user.run("adapters", "load", "loaded").returncode == 0
    assert user.run("adapters", "unload", "loaded").returncode == 0


def test_commands_apply_chat_template(user: User) -> None:
    options = ("--max-new-tokens", "4", "--temperature", "0")
    chat = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    expected = user.server.post("/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
    generated = user.run("generate", "Hi", *options)
    assert (generated.returncode, generated.stdout.rstrip("\n")) == (0, expected.rstrip("\n"))
    raw = user.server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "temperature": 0}).json
    assert user.run("generate", "--raw", "Hi", *options).stdout.rstrip("\n") == raw["choices"][0]["text"].rstrip("\n")
    chatted = user.run("chat", *options, text="Hi\n")
    assert chatted.returncode == 0
    assert expected.strip() in chatted.stdout
    assert user.run("list").returncode == 0


def test_similar_name_is_suggested(user: User) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'model'"):
        user.openai.completions.create(model="modle", prompt=PROMPT)


def test_structured_output_without_token_limit_terminates(user: User) -> None:
    schema = {"name": "words", "schema": {"type": "array", "items": {"type": "string"}}}
    response_format: Any = {"type": "json_schema", "json_schema": schema}
    reply = user.openai.chat.completions.create(model="", messages=MESSAGES, response_format=response_format)
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_tool_call_is_forced_without_tool_template(user: User) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "plan", "parameters": DAY, "strict": True}}]
    reply = user.openai.chat.completions.create(model="", messages=MESSAGES, tools=tools, tool_choice="required")
    (call,) = (reply.choices[0].message.tool_calls or [])[:1]
    assert call.function.name == "plan"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments)["day"] in ("Monday", "Tuesday")  # type: ignore[union-attr]


def test_version_and_ignored_fields_are_returned(user: User) -> None:
    assert user.server.send("GET", "/version").json["version"]
    reply = user.server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "foo": 1})
    assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "foo")


# --- Problems at start ------------------------------------------------------------------------------------------------


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_truncated(folder: Path) -> Path:
    write_model(folder)
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return folder / "model"


def write_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder


def write_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    return folder / "model.gguf"


BAD_MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such folder": (lambda folder: folder / "nothing", "there is no such file or folder"),
    "an adapter": (write_adapter, "this is an adapter"),
    "AQLM": (
        lambda folder: write_config(
            folder,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            quantization_config={"quant_method": "aqlm"},
        ),
        "the quantization method 'aqlm' is not supported; supported methods: compressed-tensors, fp8",
    ),
    "vision": (
        lambda folder: write_config(folder, model_type="llava", architectures=["LlavaForConditionalGeneration"]),
        "does not generate text; only causal language models are served",
    ),
    "unknown type": (lambda folder: write_config(folder, model_type="novel", architectures=["Novel"]), "novel"),
    "truncated weights": (write_truncated, r"was the copy interrupted\?"),
    "damaged GGUF": (write_gguf, "GGUF"),
}


@pytest.mark.parametrize("problem", BAD_MODELS)
def test_unsupported_model_error_is_one_sentence(problem: str, tmp_path: Path) -> None:
    write, message = BAD_MODELS[problem]
    done = run_lorax("serve", "--model-id", str(write(tmp_path)), "--port", "0", "--no-hub")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("lorax: ")
    assert re.search(message, line)


def test_bench_without_server_reports_error() -> None:
    done = run_lorax("bench", LORAX_URL="http://127.0.0.1:9")
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stderr
    assert not done.stdout
