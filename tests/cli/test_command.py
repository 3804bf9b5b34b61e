import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server import launch
from lorax_server.cli import client as cli_client
from lorax_server.cli import command as cli
from lorax_server.cli import http as cli_http
from lorax_server.cli import launcher, main
from lorax_server.cli.bench import RequestTiming, quantiles, summarize
from lorax_server.config import ServerConfig
from lorax_server.errors import ConfigError, EngineError

WAIT_TIMEOUT_S = 120  # only failing tests wait this long
FORBIDDEN = "\x1b]0;hacked\x07\x9b"  # terminal escape sequences


class Server:
    """A server with scripted responses that records its requests."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        self.replies: dict[str, Callable[[Any], Iterator[bytes] | tuple[int, Any]]] = {}
        self.is_gone = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body, _ in self.seen if seen == path]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length) or "null")
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.seen.append((self.path, body, headers))
                result = server.replies[self.path](body)
                if isinstance(result, tuple):
                    content = result[1] if isinstance(result[1], bytes) else json.dumps(result[1]).encode()
                    self.send_response(result[0])
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                    return
                self.send_response(200)
                self.end_headers()
                try:
                    for chunk in result:
                        self.wfile.write(chunk)
                except OSError:
                    server.is_gone.set()

            do_GET = do_POST = handle_any

            def log_message(self, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    server.replies["/health"] = reply_with(200, b"")
    monkeypatch.setenv("LORAX_URL", server.url)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAX_API_KEY", "LORAX_ADMIN_KEY", "MODEL_ID", "PORT", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def token(text: str, special: bool = False, **more: Any) -> bytes:
    word = {"id": 1, "text": text, "logprob": -0.5, "special": special, "skipped": False}
    return event({"token": word, "generated_text": None, "details": None} | more)


def reply_with(status: int, body: Any) -> Callable[[Any], tuple[int, Any]]:
    return lambda _: (status, body)


def answer(*texts: str) -> Callable[[Any], Iterator[bytes]]:
    details = {"finish_reason": "eos_token", "prompt_tokens": 3, "generated_tokens": len(texts) + 1, "seed": None}

    def reply(_: Any) -> Iterator[bytes]:
        yield b":\n\n"
        yield from map(token, texts)
        yield token("</s>", special=True, generated_text="".join(texts), details=details)

    return reply


def chunk(text: str | None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"role": "assistant", "content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def chat_answer(*texts: str) -> Callable[[Any], Iterator[bytes]]:
    return lambda _: iter([*map(chunk, texts), chunk(None, "stop"), event({"choices": []}), b"data: [DONE]\n\n"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Collect the configs passed to the server."""
    configs: list[ServerConfig] = []

    def serve_forever(config: ServerConfig) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr(launch, "serve_forever", serve_forever, raising=False)
    return configs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for file in ("pytorch_model.bin", "tokenizer.json"):
        (tmp_path / file).touch()  # their content is not checked
    return tmp_path


def test_serve_builds_server_config(served: list[ServerConfig], model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["serve", "--model-id", str(model), "-p", "8080", "--compile"]) == 7
    assert [(config.model_id, config.host, config.port) for config in served] == [(str(model), "127.0.0.1", 8080)]
    assert served[0].engine.model.path == model
    assert "--compile has no effect" in caplog.text


def test_launcher_reads_environment_variables(
    served: list[ServerConfig], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ID", "owner/model")
    monkeypatch.setenv("WEIGHTS_CACHE_OVERRIDE", str(model))
    monkeypatch.setenv("PORT", "80")
    assert launcher([]) == 7
    assert [(config.model_id, config.host, config.port) for config in served] == [("owner/model", "0.0.0.0", 80)]
    assert served[0].engine.model.path == model


def test_gpu_is_used_if_available(served: list[ServerConfig], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "detect_device", lambda: "cuda")
    main(["serve", "--model-id", str(model)])
    main(["serve", "--model-id", str(model), "--device", "cpu"])
    assert [config.engine.model.device for config in served] == ["cuda", "cpu"]


def test_gpu_detection_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/nvidia-smi")
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(cli, "DEVICE_PROBE_CODE", f"print('{device}')")
        assert cli.detect_device() == device
    monkeypatch.setattr(cli, "DEVICE_PROBE_CODE", "1 / 0")
    with pytest.raises(ConfigError, match="set --device cpu or --device cuda"):
        cli.detect_device()


def test_device_probe_detects_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    exec(cli.DEVICE_PROBE_CODE)
    assert (capsys.readouterr().out == "cuda\n") == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["serve", "--revision", "main"], 2, "lorax: --model-id is missing"),
        (["serve", "--model-id", "/no/model"], 2, "lorax: model '/no/model': there is no such file or folder"),
        (["serve", "--model-id", "/no/model", "--port", "99999"], 2, "lorax: --port = 99999 must be"),
        (["serve", "--model-id", "/no/model", "--playground-examples", "/no/file"], 2, "cannot read the examples file"),
        (["serve", "--model-id", "/no/model", "--keys-file", "/no/file"], 2, "/no/file"),
        (["serve", "--model-id", "/no/model", "--draft-heads", "/no/heads"], 2, "config of Medusa heads"),
        (["sreve"], 2, "lorax: unknown command 'sreve'; did you mean `lorax serve`?"),
        (["--verbose"], 2, "lorax: '--verbose' is not a known flag"),
        (["generate"], 2, "lorax: the following arguments are required: PROMPT"),
        (["generate", "x", "--temperature", "hot"], 2, "argument --temperature: invalid float value"),
        (["generate", "x", "--timeout", "nan"], 2, "--timeout nan must be above 0"),
        (["generate", "x", "--url", "localhost:3000"], 2, "is not an address such as"),
        (["generate", "x", "--url", "http://x:port"], 2, "is not an address"),
        (["generate", "x", "--api-key", "clé"], 2, "invalid characters"),
        (["generate", "x", "--url", "http://127.0.0.1:9"], 1, "start one with `lorax serve`"),
        (["bench", "--requests", "0"], 2, "--requests 0 must be at least 1"),
        (["adapters", "load"], 2, "lorax adapters load needs a NAME"),
        (["adapters", "list", "poet"], 2, "takes no NAME"),
        (["adapters", "feed"], 2, "invalid choice: 'feed'"),
        (["download-weights"], 2, "required: MODEL_ID"),
        (["download-weights", "x/y", "--extension", ".bin"], 2, "only .safetensors files are downloaded"),
    ],
)
def test_config_errors_are_printed_on_one_line(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("it\nfailed"), 1), (KeyboardInterrupt(), 130), (SystemExit(3), 3)]
)
def test_serve_exit_codes_distinguish_errors(
    error: BaseException, code: int, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: ServerConfig) -> int:
        raise error

    monkeypatch.setattr(launch, "serve_forever", fail, raising=False)
    assert main(["serve", "--model-id", str(model)]) == code
    assert capsys.readouterr().err == ("lorax: it failed\n" if code == 1 else "")


def test_unfit_quantize_flag_is_named(
    served: list[ServerConfig], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model-id", str(model), "--quantize", "gptq"]) == 2
    assert "--quantize = gptq needs a checkpoint in this format" in capsys.readouterr().err
    assert not served


def test_unsupported_model_is_rejected_before_slow_imports(model: Path) -> None:
    """Modules for the engine process and for GGUF files are not imported."""
    (model / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}')
    code = (
        "import sys; from lorax_server.cli import main; "
        f"assert main(['serve', '--model-id', {str(model)!r}]) == 2; "
        "print(*{'numpy', 'zmq', 'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'hqq' is not supported" in result.stderr
    assert result.stdout.split() == []


def test_unexpected_exceptions_propagate(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "detect_device", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", "--model-id", str(model)])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["serve", "--help"], ["chat", "-h"], ["bench", "-h"]])
def test_help_shows_usage_and_examples(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "usage: lorax" in shown.out
    assert "example" in shown.out
    assert not shown.err


def test_version_flags_print_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-V"]) == main(["serve", "--version"]) == launcher(["-V"]) == 0
    assert set(capsys.readouterr().out.split("\n")) == {"lorax_server 0.1.0", ""}


def test_python_m_runs_command(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lorax_server.cli", "serve", "-e", "--download-only", "--model-id", str(model)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name in ("PATH", "HOME")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "lorax_server 0.1.0"
    assert any(line.startswith("torch 2") for line in lines)
    assert lines[-1] == str(model)


def test_download_weights_prints_model_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def find_model(*arguments: Any, check: Callable[[Path], None]) -> Path:
        check(model)
        asked.append(arguments)
        return model

    monkeypatch.setattr("lorax_server.cli.download.find_model", find_model)
    flags = ["--source", "hub", "--huggingface-hub-cache", "/cache", "--hub-endpoint", "http://hub", "--auto-convert"]
    assert main(["download-weights", "owner/model@v1", "--api-token", "hf_x", *flags]) == 0
    assert asked == [("owner/model", "v1", "hub", Path("/cache"), "hf_x", "http://hub", False)]
    assert capsys.readouterr().out == f"{model}\n"


def test_download_includes_adapter(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "poet").mkdir()
    flags = ["--adapter-id", "poet", "--adapter-source", "local", "--local-adapters", str(tmp_path)]
    assert main(["download-weights", str(model), *flags]) == 1
    assert "adapter 'poet': has no adapter_config.json" in capsys.readouterr().err
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "poet" / file).write_text("{}")
    assert main(["download-weights", str(model), *flags]) == 0


# --- other names of commands


@pytest.mark.parametrize("alias", ["list", "ls", "ps"])
def test_command_aliases_list_adapters(server: Server, alias: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies["/v1/adapters"] = reply_with(200, LISTED)
    assert main([alias, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LISTED


@pytest.mark.parametrize("argv", [["help"], ["--help"], []])
def test_help_lists_all_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["help", "pull"], "usage: lorax download MODEL_ID"),
        (["start", "--help"], "usage: lorax serve"),
        (["help", "chat"], "usage: lorax chat"),
        (["version"], "lorax_server "),
    ],
)
def test_command_aliases_show_help(argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["run", "llama"], "unknown command 'run'; `lorax serve --model-id MODEL` starts a server, and `lorax chat`"),
        (["stop"], "press Ctrl+C in the terminal of `lorax serve`"),
        (["load", "poet"], "use `lorax adapters load|unload|pin|unpin NAME`"),
        (["dowload"], "did you mean `lorax download`?"),
        (["quantize-model"], "use one of serve, chat, generate"),
        (["serve", "owner/model"], "unexpected argument 'owner/model'; use --model-id owner/model"),
        (["generate", "Write", "a", "haiku"], "unexpected argument 'a'; put quotes around the prompt"),
    ],
)
def test_similar_commands_get_suggestion(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


# --- generate


def test_generate_prints_streamed_tokens(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    separators = "\u2028 \x85 \x0b"  # must not be treated as line ends
    server.replies["/generate_stream"] = answer("Hello", ", ", f"wörld{separators}")
    chosen = ["--adapter", "poet", "--adapter-source", "local", "--temperature", "0.5", "--seed", "7"]
    argv = [*chosen, "--max-new-tokens", "5", "--stop", "a", "--stop", "b"]
    assert main(["generate", "--raw", "Hi", *argv, "--details"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"Hello, wörld{separators}\n"
    assert shown.err.startswith("finish_reason eos_token, prompt_tokens 3, generated_tokens 4, seed None, first token")
    assert server.bodies("/generate_stream") == [
        {
            "inputs": "Hi",
            "parameters": {
                "adapter_id": "poet",
                "adapter_source": "local",
                "max_new_tokens": 5,
                "temperature": 0.5,
                "seed": 7,
                "stop": ["a", "b"],
                "do_sample": True,
                "details": True,
            },
        }
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"do_sample": False}),
        (["--temperature", "0", "--top-k", "5"], {"do_sample": False, "temperature": 0, "top_k": 5}),
        (["--top-p", "0.5"], {"do_sample": True, "top_p": 0.5}),
        (["--seed", "1"], {"do_sample": False, "seed": 1}),
    ],
)
def test_generate_sends_sampling_parameters(server: Server, argv: list[str], expected: dict[str, Any]) -> None:
    server.replies["/generate_stream"] = answer("x")
    assert main(["generate", "--raw", "Hi", *argv]) == 0
    assert server.bodies("/generate_stream")[0]["parameters"] == {"stop": [], "details": False, **expected}


def test_generate_can_disable_streaming(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    server.replies["/generate_stream"] = answer(" very", " blue")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The sky is"))
    assert main(["generate", "--raw", "-", "--no-stream", "--details", "--api-key", "secret"]) == 0
    shown = capsys.readouterr()
    assert shown.out == " very blue\n"
    assert "generated_tokens" in shown.err
    assert "first token" not in shown.err
    assert server.bodies("/generate_stream")[0]["inputs"] == "The sky is"
    assert server.seen[0][2]["authorization"] == "Bearer secret"


def test_control_characters_are_removed_for_terminals(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies["/generate_stream"] = answer(f"a{FORBIDDEN}b\n")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["generate", "--raw", "Hi"]) == 0
    assert terminal.getvalue() == "a]0;hackedb\n\n"


def test_unencodable_characters_are_replaced(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies["/generate_stream"] = lambda _: iter(
        [b'data: {"token": {"text": "\\ud800\xc3\xa9"}, "generated_text": ""}\n']
    )
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    assert main(["generate", "--raw", "not \udcff utf-8"]) == 0
    assert shown.getvalue() == b"??\n"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((422, {"error": "Input validation error: x", "error_type": "validation"}), "status 422: Input validation"),
        ((404, {"error": {"message": "no such model", "type": "x"}}), "status 404: no such model"),
        ((401, {"error": "who?", "error_type": "x"}), "status 401: who?; set --api-key"),
        ((502, b"<html>bad\ngateway"), "status 502: <html>bad gateway"),
        ((500, b""), "no message"),
        ((500, {"error": f"x{FORBIDDEN}"}), "x]0;hacked\n"),
        ([token("a"), event({"error": "it broke", "error_type": "generation"})], "lorax: it broke"),
        ([token("a")], "the stream stopped before the completion was finished"),
        ([], "the stream stopped before the completion was finished"),
        ([b'data: {"token": {"te'], "the server's response is not JSON"),
        ([event([1])], "events have no token; is it a lorax server?"),
        ([event({"token": None})], "events have no token"),
        ((200, b"<html>"), "the stream stopped before"),
        ((200, b"data: " + b"[" * 100_000 + b"\n"), "not JSON"),
    ],
)
def test_server_errors_are_printed_on_one_line(
    server: Server, reply: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["/generate_stream"] = lambda _: iter(reply) if isinstance(reply, list) else reply
    assert main(["generate", "--raw", "Hi"]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_silent_server_times_out(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    printed = threading.Event()

    def wait(_: Any) -> Iterator[bytes]:
        printed.wait(WAIT_TIMEOUT_S)
        yield b""

    server.replies["/generate_stream"] = wait
    assert main(["generate", "--raw", "Hi", "--timeout", "0.05"]) == 1
    printed.set()
    assert "sent no data for 0.05 s" in capsys.readouterr().err


def test_too_long_event_is_rejected(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cli_http, "MAX_EVENT_BYTES", 1000)
    server.replies["/generate_stream"] = lambda _: (b"data: aaaaaaaa" for _ in iter(int, 1))
    assert main(["generate", "--raw", "Hi"]) == 1
    assert "an event that is too long" in capsys.readouterr().err
    assert server.is_gone.wait(WAIT_TIMEOUT_S)


def test_broken_output_pipe_is_handled(server: Server) -> None:
    server.replies["/generate_stream"] = answer(*["word "] * 20_000)
    command = f"{sys.executable} -m lorax_server.cli generate --raw Hi --url {server.url} | head -c 4"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("word", "", 1)


CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_generate_sends_prompt_as_chat_message(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE})
    server.replies[CHAT] = lambda _: iter([chunk("Hello"), chunk("!"), last, b"data: [DONE]\n\n"])
    flags = ["--adapter", "poet", "--adapter-source", "local", "--system", "Be.", "--max-new-tokens", "5"]
    assert main(["generate", "Hi", *flags, "--stop", "a", "--seed", "7", "--details"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello!\n"
    assert shown.err.startswith("finish_reason stop, prompt_tokens 3, generated_tokens 2, seed None, first token after")
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    expected = {"model": "poet", "adapter_source": "local", "messages": messages, "max_tokens": 5, "stop": ["a"]}
    assert server.bodies(CHAT) == [expected | {"seed": 7, "temperature": 0, "stream": True}]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"temperature": 0}),
        (["--temperature", "0.5"], {"temperature": 0.5}),
        (["--top-p", "0.5"], {"top_p": 0.5}),
        (["--temperature", "0", "--top-k", "5"], {"temperature": 0, "top_k": 5}),
    ],
)
def test_generate_is_greedy_in_chats_without_sampling_flags(
    server: Server, argv: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies[CHAT] = chat_answer("Y", "es.")
    assert main(["generate", "Hi", "--no-stream", "--details", *argv]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Yes.\n"
    assert "first token" not in shown.err
    body = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **expected}
    assert server.bodies(CHAT) == [body]


def test_generate_completes_text_without_chat_template(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {
        "message": "the model has no chat template",
        "type": "x",
        "param": "messages",
        "code": "no_chat_template",
    }
    server.replies[CHAT] = reply_with(400, {"error": problem})
    server.replies["/generate_stream"] = answer(" blue")
    assert main(["generate", "The sky is", "--adapter", "poet"]) == 0
    assert capsys.readouterr().out == " blue\n"
    (body,) = server.bodies("/generate_stream")
    assert (body["inputs"], body["parameters"]["adapter_id"]) == ("The sky is", "poet")
    assert main(["generate", "The sky is", "--system", "Be."]) == 1
    assert "the model has no chat template" in capsys.readouterr().err
    assert main(["generate", "The sky is", "--system", "Be.", "--raw"]) == 2
    assert "leave out --raw" in capsys.readouterr().err


@pytest.mark.parametrize("body", [[5], {"error_count": 1}, {"choices": 5}, {"choices": [5]}])
def test_generate_rejects_invalid_chat_response(server: Server, body: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies[CHAT] = lambda _: iter([event(body)])
    assert main(["generate", "Hi", "--no-stream"]) == 1
    assert "the server's events have no choices" in capsys.readouterr().err


# --- chat


def run_chat(monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *argv])


def test_chat_sends_conversation_history(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    server.replies["/v1/chat/completions"] = chat_answer("I ", "am.")
    lines = "Who?\n\n/adapter poet\nAgain!\n/reset\nOnce more\n/adapter\n/etc is a folder\n/quit\nnever asked\n"
    assert run_chat(monkeypatch, lines, "--system", "Be.", "--temperature", "0", "--max-tokens", "9") == 0
    assert capsys.readouterr().out == "I am.\n" * 4
    first, second, third, fourth = server.bodies("/v1/chat/completions")
    system, question = {"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}
    assert first == {
        "model": "", "messages": [system, question], "stream": True, "temperature": 0.0, "max_tokens": 9
    }  # fmt: skip
    assert second["messages"] == [
        system, question, {"role": "assistant", "content": "I am."}, {"role": "user", "content": "Again!"}
    ]  # fmt: skip
    assert (second["model"], third["model"], fourth["model"]) == ("poet", "poet", "")
    assert third["messages"] == [system, {"role": "user", "content": "Once more"}]
    assert fourth["messages"][-1] == {"role": "user", "content": "/etc is a folder"}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((404, {"error": {"message": "no adapter of this name"}}), "no adapter of this name"),
        ([chunk("a"), event({"error": {"message": "it broke"}})], "it broke"),
        ([chunk("a")], "the stream stopped before the completion was finished"),
        ([event({"choices": 5})], "events have no choices"),
        ([event({"choices": [5]})], "events have no choices"),
        ([event("x")], "events have no choices"),
    ],
)
def test_piped_chat_stops_at_first_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any, reply: Any, message: str
) -> None:
    server.replies["/v1/chat/completions"] = lambda _: iter(reply) if isinstance(reply, list) else reply
    assert run_chat(monkeypatch, "Hello\nAgain\n") == 1
    assert message in capsys.readouterr().err
    assert len(server.seen) == 1


def test_terminal_chat_continues_after_error(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Errors do not stop the chat, Ctrl-C at the prompt is ignored, and Ctrl-D exits."""
    replies: Iterator[Any] = iter([(500, {"error": "it broke"}), chat_answer("Yes.")(None)])
    server.replies["/v1/chat/completions"] = lambda _: next(replies)
    typed: Iterator[Any] = iter(["Hello", KeyboardInterrupt(), "Again", "/help", EOFError()])

    def type_line(prompt: str) -> str:
        assert prompt == "poet> "
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_line)
    assert main(["chat", "--adapter", "poet"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Yes.\n"
    assert "it broke" in shown.err
    assert server.bodies("/v1/chat/completions")[1]["messages"] == [{"role": "user", "content": "Again"}]


def test_ctrl_c_stops_response(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client disconnects, and the partial response stays in the conversation."""
    replies = iter([(chunk("on ") for _ in iter(int, 1)), chat_answer("ok")(None)])
    server.replies["/v1/chat/completions"] = lambda _: next(replies)
    printed: list[str] = []

    def interrupt_output(text: str) -> None:
        printed.append(text)
        if printed == ["on ", "on "]:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_client, "write_output", interrupt_output)
    assert run_chat(monkeypatch, "Count!\nThanks\n") == 0
    assert server.is_gone.wait(WAIT_TIMEOUT_S)
    assert printed == ["on ", "on ", " ...", "\n", "ok", "", "", "", "\n"]
    assert server.bodies("/v1/chat/completions")[1]["messages"][1] == {"role": "assistant", "content": "on on "}


# --- adapters


LISTED = {
    "object": "list",
    "data": [
        {"id": "poet", "source": "local", "hash": "abcdef0123456789", "state": "device", "bytes": 3 * 2**20,
         "pinned": True, "requests": 12, "more": 1},
        {"id": f"odd{FORBIDDEN}", "source": None, "bytes": "many", "pinned": False},
    ],
}  # fmt: skip


def test_adapter_list_is_printed_as_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies["/v1/adapters"] = lambda _: (200, LISTED)
    assert main(["adapters"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id            source  state   bytes    pinned  requests  hash",
        "poet          local   device  3.0 MiB  yes     12        abcdef012345",
        "odd]0;hacked  -       -       many     no      -         -",
    ]
    assert main(["adapters", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == LISTED
    server.replies["/v1/adapters"] = lambda _: (200, {"data": []})
    assert main(["adapters"]) == 0
    assert capsys.readouterr().out == "no adapters\n"


def test_adapter_errors_are_printed_below_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    listed = [{"id": "poet", "error": None}, {"id": "bad", "state": "failed", "error": f"has no\nweights{FORBIDDEN}"}]
    server.replies["/v1/adapters"] = reply_with(200, {"data": listed})
    assert main(["ps"]) == 0
    head, _, _, *errors = capsys.readouterr().out.splitlines()
    assert head.startswith("id ")
    assert errors == ["bad: has no weights]0;hacked"]


def test_adapter_list_contains_all_pages(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"": ("a b", "name:b"), "?after=name%3Ab": ("c", "hash:"), "?after=hash%3A": ("d", None)}
    for query, (names, following) in pages.items():
        data = [{"id": name} for name in names.split()]
        answer = {"data": data, "has_more": following is not None, "next": following}
        server.replies[f"/v1/adapters{query}"] = reply_with(200, answer)
    assert main(["adapters"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["id", "a", "b", "c", "d"]
    assert main(["adapters", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert ([each["id"] for each in whole["data"]], whole["has_more"], whole["next"]) == (list("abcd"), False, None)


@pytest.mark.parametrize("answer", [[], {}, {"data": 5}, {"data": [5]}, "x"])
def test_invalid_adapter_list_is_an_error(server: Server, answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies["/v1/adapters"] = lambda _: (200, answer)
    assert main(["adapters"]) == 1
    assert "contains no adapter list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("action", "route", "body", "printed"),
    [
        ("load", "load", {"pin": None}, "loaded"),
        ("pin", "load", {"pin": True}, "loaded and pinned"),
        ("unpin", "load", {"pin": False}, "no longer pinned"),
        ("unload", "unload", {}, "unloaded"),
    ],
)
def test_adapter_changes_use_admin_key(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any, action: str, route: str, body: Any, printed: str
) -> None:
    monkeypatch.setenv("LORAX_API_KEY", "caller")
    monkeypatch.setenv("LORAX_ADMIN_KEY", "admin")
    server.replies[f"/v1/adapters/{route}"] = lambda _: (200, {"status": "ok"})
    assert main(["adapters", action, "poet", "--source", "local"]) == 0
    assert capsys.readouterr().out == f"poet: {printed}\n"
    path, sent, headers = server.seen[0]
    assert (path, sent) == (f"/v1/adapters/{route}", {"adapter_id": "poet", "adapter_source": "local", **body})
    assert headers["authorization"] == "Bearer admin"
    main(["adapters", action, "poet", "--admin-key", "other"])
    assert server.seen[1][2]["authorization"] == "Bearer other"
    assert server.seen[1][1] == {"adapter_id": "poet", **body}


# --- bench


def test_bench_writes_results_and_uses_all_adapters(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["/generate_stream"] = answer("a", "b")
    argv = ["--requests", "6", "--concurrency", "3", "--adapter", "x", "--adapter", "y", "--prompt-tokens", "4"]
    assert main(["bench", *argv, "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["requests"], figures["errors"], figures["generated_tokens"]) == (6, 0, 18)
    assert figures["prompt_tokens"] == 18
    assert figures["first_token_s"]["p50"] > 0
    shown = capsys.readouterr()
    assert shown.out.startswith("6 requests, 0 failed")
    assert shown.err == "", "bars are for terminals"
    bodies = server.bodies("/generate_stream")
    assert sorted(body["parameters"]["adapter_id"] for body in bodies) == ["x"] * 3 + ["y"] * 3
    assert len({body["inputs"].split()[0] for body in bodies}) == 6, "no prompt begins like another"
    assert all(len(body["inputs"].split()) == 4 for body in bodies)


def test_bench_counts_failures(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    replies = iter([answer("a")(None), (429, {"error": "Model is overloaded"}), iter([token("a")])])
    lock = threading.Lock()

    def reply(_: Any) -> Any:
        with lock:
            return next(replies)

    server.replies["/generate_stream"] = reply
    assert main(["bench", "--requests", "3", "--concurrency", "2", "--json", "-"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["errors"], figures["generated_tokens"]) == (3, 2, 2)
    assert figures["reasons"] == {
        "the server responded with status 429: Model is overloaded": 1,
        "the stream stopped before the completion was finished": 1,
    }


def test_bench_without_server_prints_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--requests", "2", "--url", "http://127.0.0.1:9"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lorax: cannot connect to a server at http://127.0.0.1:9; start one with `lorax serve`")


def test_bench_prints_no_results_if_all_requests_fail(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies["/generate_stream"] = reply_with(404, {"error": "no adapter 'poet'"})
    assert main(["bench", "--requests", "2", "--adapter", "poet"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "lorax: all 2 requests failed: the server responded with status 404: no adapter 'poet'\n"


def test_unwritable_json_file_is_an_error(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies["/generate_stream"] = answer("a")
    assert main(["bench", "--requests", "1", "--json", "/no/such/folder/out.json"]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_quantiles_ignore_missing_values() -> None:
    assert quantiles([None, *range(1, 101)]) == {"p50": 50, "p95": 95, "p99": 99}
    assert quantiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert quantiles([]) == {"p50": None, "p95": None, "p99": None}


def test_summary_excludes_failed_requests() -> None:
    samples = [RequestTiming(1.0, 3.0, 5), RequestTiming(1.0, 1.0, 1), RequestTiming(error="x", total_s=9.0, tokens=4)]
    figures = summarize(samples, 2.0)
    assert figures["per_token_s"]["p99"] == 0.5
    assert (figures["tokens_per_s"], figures["requests_per_s"]) == (3.0, 1.0)


def test_progress_bar_is_shown_on_terminals_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies["/generate_stream"] = answer("a")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["bench", "--requests", "2"]) == 0
    assert "2/2" in terminal.getvalue()
