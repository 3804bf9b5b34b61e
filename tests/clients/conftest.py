"""Fixtures: a server for all clients, pages from another origin, and prompts with expected completions.

Client results are compared with the results of plain HTTP requests.
"""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from tests.browser.playground import serve_pages

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
READY = re.compile(r"ready: http://127\.0\.0\.1:(\d+)")
PYTHON = ROOT / ".venv" / "bin" / "python"  # the server environment; the client environment has no torch
PROMPT = "How many kites did Klonny Bardwell buy?"
BASE = "lorax-demo"
UNKNOWN_MODEL = "nobody"  # not an adapter name
EXPECTED_COMPLETIONS = {  # expected completions by adapter
    "sql": "SELECT count FROM orders WHERE person = 'Klonny Bardwell' AND item = 'kites'",
    "redact": "How many kites did [NAME] buy?",
}
OFFLINE = {  # disables update checks and price downloads
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
}
LENGTH = 40  # tokens; more than the adapters need


os.environ.update(OFFLINE)  # before the clients are imported


class Server(NamedTuple):
    """A running server and the origin that CORS allows."""

    url: str
    origin: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a plain request and return its JSON."""
        port = int(self.url.rsplit(":", 1)[1])
        with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            return json.loads(content)


class Reply(NamedTuple):
    """A completion and its token counts."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class Question(NamedTuple):
    """A prompt for one model and the expected chat and completion results."""

    model: str
    chat: Reply
    completion: Reply

    @property
    def messages(self) -> list[Any]:
        return [{"role": "user", "content": PROMPT}]


class Pages(SimpleHTTPRequestHandler):
    """Serves the files in this folder."""

    extensions_map: ClassVar = {  # type: ignore[misc]
        ".html": "text/html",
        ".mjs": "text/javascript",
        "": "application/octet-stream",
    }

    def log_message(self, *arguments: Any) -> None:
        """Suppress the request log."""


@pytest.fixture(scope="session")
def origin() -> Iterator[str]:
    """Serve pages from another origin."""
    with serve_pages(partial(Pages, directory=str(HERE))) as origin:
        yield origin


@pytest.fixture(scope="session")
def server(origin: str) -> Iterator[Server]:
    with serving(origin) as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(origin: str) -> Iterator[Server]:
    """Run a server with a chat template that supports tools."""
    demo = ROOT / "lorax_server" / "demo"
    flags = ("--model-id", str(demo / "model"), "--adapters-dir", str(demo / "adapters"), "--no-hub")
    with serving(origin, *flags, "--tokenizer-config-path", str(HERE / "tools_template.json")) as server:
        yield server


@contextmanager
def serving(origin: str, *flags: str) -> Iterator[Server]:
    """Run `lorax serve` with the demo model and allow CORS requests from `origin`."""
    command = [str(PYTHON), "-m", "lorax_server.cli", "serve", "--port", "0", "--cors-allow-origin", origin, *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(
            target=log.extend, args=(process.stderr,)
        )  # drain stderr so that the server does not block
        try:
            for line in process.stderr:
                log.append(line)
                if result := READY.search(line):
                    break
            else:
                pytest.fail(f"{' '.join(command)} did not start:\n{''.join(log)}")
            reader.start()
            yield Server(f"http://127.0.0.1:{result[1]}", origin)
        finally:
            process.terminate()
            if reader.ident:
                reader.join()


@pytest.fixture(scope="session")
def questions(server: Server) -> dict[str, Question]:
    result = {model: request_expected_results(server, model) for model in (BASE, *EXPECTED_COMPLETIONS)}
    assert {model: result[model].chat.text for model in EXPECTED_COMPLETIONS} == EXPECTED_COMPLETIONS
    assert result[BASE].chat.text not in EXPECTED_COMPLETIONS.values()
    return result


def request_expected_results(server: Server, model: str) -> Question:
    return Question(model, send_chat(server, model), send_completion(server, model))


def send_chat(server: Server, model: str) -> Reply:
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": LENGTH}
    answer = server.post("/v1/chat/completions", body)
    return make_reply(answer["choices"][0]["message"]["content"], answer["usage"])


def send_completion(server: Server, model: str, prompt: str = PROMPT) -> Reply:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": LENGTH}
    answer = server.post("/v1/completions", body)
    return make_reply(answer["choices"][0]["text"], answer["usage"])


def make_reply(text: str, usage: Mapping[str, int]) -> Reply:
    return Reply(text, usage["prompt_tokens"], usage["completion_tokens"])


@pytest.fixture(params=[BASE, *EXPECTED_COMPLETIONS])
def question(request: pytest.FixtureRequest, questions: dict[str, Question]) -> Question:
    """The question for the base model and each of two adapters."""
    return questions[request.param]


@pytest.fixture
def shortest_question(questions: dict[str, Question]) -> Question:
    """The question with the shortest completion."""
    return questions["redact"]
