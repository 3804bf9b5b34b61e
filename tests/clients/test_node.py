"""Node.js clients: OpenAI's SDK and Vercel's AI SDK."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.conftest import HERE, LENGTH, PROMPT, UNKNOWN_MODEL, Question, Server, send_completion

NODE = Path(sys.executable).parent / "node"
RUN = (
    "const { ask } = await import(process.argv[1]); console.log(JSON.stringify(await ask(JSON.parse(process.argv[2]))))"
)
LIMIT_S = 240


def script_arguments(server: Server, questions: dict[str, Question]) -> dict[str, Any]:
    return {"url": server.url, "models": list(questions), "prompt": PROMPT, "length": LENGTH, "nobody": UNKNOWN_MODEL}


def check(found: Any, questions: dict[str, Question]) -> None:
    """Compare script results with plain requests."""
    assert found["answers"] == {model: expected_of(question) for model, question in questions.items()}
    assert set(questions) <= set(found.get("listed", questions))
    assert len(found["refused"]) == 2
    for is_right_class, status, message in found["refused"]:
        assert (is_right_class, status) == (True, 404)
        assert UNKNOWN_MODEL in message


def expected_of(question: Question) -> dict[str, list[Any]]:
    chat, completion = [*question.chat], [*question.completion]
    return {"chat": chat, "chatStream": chat, "completion": completion, "completionStream": completion}


def run(script: str, payload: dict[str, Any]) -> Any:
    command = [str(NODE), "--input-type=module", "-e", RUN, f"./{script}", json.dumps(payload)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai_client_matches_raw_http(server: Server, questions: dict[str, Question]) -> None:
    check(run("ask_openai.mjs", script_arguments(server, questions)), questions)


def test_vercel_client_matches_raw_http(server: Server, questions: dict[str, Question]) -> None:
    """Compare with plain completions, using the SDK's prompt format."""
    prompt = f"user:\n{PROMPT}\n\nassistant:\n"
    payload = {
        model: question._replace(completion=send_completion(server, model, prompt))
        for model, question in questions.items()
    }
    check(run("ask_vercel.mjs", script_arguments(server, payload)), payload)


def test_vercel_tool_calls_follow_schema(tool_server: Server) -> None:
    actual = run("ask_vercel_tools.mjs", {"url": tool_server.url, "model": "sql", "prompt": PROMPT})
    assert actual.keys() == {"compatible", "chat", "responses"}
    for made in actual.values():
        for each in made["objects"]:
            check_count(each)
        assert len(made["calls"]) == 4
        for reason, (name, given) in made["calls"]:
            assert (reason, name) == ("tool-calls", "tell")
            check_count(given)
        (((count, result),), _), (others, _) = made["agent"]
        assert (result, others) == (f"{count} kites", [])


def check_count(value: Any) -> None:
    assert value.keys() == {"count"}
    assert 0 <= value["count"] <= 99
