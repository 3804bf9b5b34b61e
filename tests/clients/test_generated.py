"""Clients generated from the server's OpenAPI document."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

MODELS = ["", "sql", "redact"]  # the base model and two adapters
PROMPT = "How many kites did Klonny Bardwell buy?"
ANSWER = {"model": "sql", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8}
NODE_MODULES = Path(__file__).parent / "node_modules"
BIN = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
MINUTE_S = 60
PROGRAM = """
import type { components, paths } from "./schema";
type Chat = paths["/v1/chat/completions"]["post"];
const body: components["schemas"]["ChatCompletionRequest"] = BODY;
const ask = (more: object) => fetch("URL/v1/chat/completions", {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...body, ...more }),
});
const whole: Chat["responses"][200]["content"]["application/json"] = await (await ask({})).json();
const events: Chat["responses"][200]["content"]["text/event-stream"] = await (await ask({ stream: true })).text();
const lines = events.split("\\n\\n").filter((line) => line.startsWith("data: {"));
const chunks: components["schemas"]["ChatCompletionChunk"][] = lines.map((line) => JSON.parse(line.slice(6)));
const streamed = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
console.log(JSON.stringify([whole.choices[0]?.message.content, streamed]));
export {};
"""


class Running(Protocol):
    """The attributes of the fixture `server` that these tests use."""

    @property
    def url(self) -> str: ...


# --- openapi-python-client --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Generate a package and check that the generator prints no warnings."""
    folder = tmp_path_factory.mktemp("generated")
    wanted = ["--url", f"{server.url}/openapi.json", "--output-path", str(folder / "written"), "--meta", "none"]
    command = [sys.executable, "-m", "openapi_python_client", "generate", *wanted, "--fail-on-warning"]
    made = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=MINUTE_S, env={**os.environ, "PATH": BIN}
    )
    assert made.returncode == 0, made.stdout + made.stderr
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("written")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "written"]:
            del sys.modules[name]


def part(name: str) -> Any:
    return importlib.import_module(f"written.{name}")


@pytest.mark.parametrize("model", MODELS)
def test_generated_client_can_chat_and_complete(model: str, generated: ModuleType, server: Running) -> None:
    models = part("models")
    messages = [models.Message(role="user", content=PROMPT)]
    with generated.Client(base_url=server.url) as client:
        body = models.ChatCompletionRequest(model=model, messages=messages, temperature=0.0, max_tokens=8)
        answer = part("api.open_ai_compatible.chat").sync(client=client, body=body)
        assert isinstance(answer, models.ChatCompletionResponse)
        assert answer.usage.completion_tokens <= 8
        body = models.CompletionRequest(model=model, prompt=PROMPT, temperature=0.0, max_tokens=8)
        completed = part("api.open_ai_compatible.complete").sync(client=client, body=body)
        assert completed.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("model", MODELS)
def test_generated_client_streams_same_text(model: str, generated: ModuleType, server: Running) -> None:
    models = part("models")
    body = models.GenerateRequest(
        inputs=PROMPT, parameters=models.GenerateParameters(adapter_id=model, max_new_tokens=8)
    )
    with generated.Client(base_url=server.url) as client:
        answer = part("api.lo_rax.generate").sync(client=client, body=body)
        streamed = part("api.lo_rax.generate_stream").sync(client=client, body=body)
        lines = [line[6:] for line in streamed.split("\n\n") if line]
        events = [models.StreamResponse.from_dict(json.loads(line)) for line in lines]
        assert events[-1].generated_text == answer.generated_text


def test_generated_client_parses_errors_and_lists(generated: ModuleType, server: Running) -> None:
    models = part("models")
    with generated.Client(base_url=server.url) as client:
        listed = part("api.open_ai_compatible.list_models").sync(client=client)
        assert {model.id for model in listed.data} >= {"sql", "redact"}
        assert part("api.lo_rax.get_info").sync(client=client).max_total_tokens > 0
        body = models.CompletionRequest(model="nobody", prompt=PROMPT)
        missing = part("api.open_ai_compatible.complete").sync(client=client, body=body)
        assert (missing.error.code, missing.error.param) == ("model_not_found", "model")
        assert part("api.lo_rax.check_health").sync_detailed(client=client).status_code == 200


# --- openapi-typescript -----------------------------------------------------------------------------------------------


def test_typescript_program_compiles_and_streams_same_text(server: Running, tmp_path: Path) -> None:
    """Type-check a program against the generated types and run it with and without streaming."""
    node = shutil.which("node", path=BIN)
    assert node is not None, "make test-clients installs it"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [node, *arguments], capture_output=True, text=True, check=False, timeout=MINUTE_S, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    generator, compiler = NODE_MODULES / "openapi-typescript/bin/cli.js", NODE_MODULES / "typescript/bin/tsc"
    run(str(generator), f"{server.url}/openapi.json", "-o", "schema.d.ts", "--default-non-nullable=false")
    program = PROGRAM.replace("BODY", json.dumps(ANSWER)).replace("URL", server.url)
    (tmp_path / "program.mts").write_text(program.replace("./schema", "./schema.d.ts"))
    options = "--strict --skipLibCheck --target es2022 --module nodenext --lib es2022,dom"
    run(str(compiler), *options.split(), "program.mts")
    whole, streamed = json.loads(run("program.mjs"))
    assert whole
    assert whole == streamed
