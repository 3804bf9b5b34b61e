"""Runs `lorax serve` with a tiny model and adapters for end-to-end tests."""

import copy
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.e2e.command import FORKED_PREFIX
from tests.models.tiny import SERVED
from tests.parity.test_engine import write_adapter
from tests.parity.variants import VARIANTS
from tests.processes import has_role
from tests.text.tokenizers import byte_level

ROOT = Path(__file__).parent.parent.parent
READY = re.compile(r"ready: (http://\S+)")
START_TIMEOUT_S = 240  # only failing tests wait this long
RANKS = {"first": 2, "second": 5}
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(byte_level(300).tokenizer), eos_token="</s>", bos_token="<s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def write_model(folder: Path, name: str = "llama-gqa") -> Any:
    """Write a tiny model with a tokenizer and two adapters. Return the transformers model.

    A model that the registry does not know gets no adapters.
    """
    tokenizer = make_tokenizer()
    config = VARIANTS[name].config() if name in VARIANTS else SERVED[name]()
    config.vocab_size, config.eos_token_id, config.bos_token_id = len(tokenizer), tokenizer.eos_token_id, None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.normal_(0, 0.3)
        if parameter.dim() == 1 and parameter_name.endswith("weight"):
            parameter.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    (folder / "adapters").mkdir()
    for adapter, rank in RANKS.items() if name in VARIANTS else ():
        write_adapter(copy.deepcopy(model), name, rank, folder / "adapters" / adapter)
    return model


def with_adapter(model: Any, folder: Path) -> Any:
    """Load an adapter with PEFT and return the transformers model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval().get_base_model()


def write_variant_adapter(adapter: Path, folder: Path) -> None:
    """Write an adapter with the same shape and different weights."""
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor.flip(-1).contiguous() for name, tensor in tensors.items()}, folder / "new.safetensors")
    os.replace(folder / "new.safetensors", folder / "adapter_model.safetensors")


def import_path() -> str:
    """Return the `PYTHONPATH` for processes that tests start."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


class HttpResponse(NamedTuple):
    """A raw HTTP response with lower-case header names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Decode stream events. Skip comments, and fail on other lines."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *pieces, rest = self.body.split(b"\n\n")
        assert rest == b""
        lines = [piece for piece in pieces if piece != b":"]
        assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
        return [line[6:].decode() if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]


class Server:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> HttpResponse:
        """Send a request on a new connection. Bytes are sent unchanged, other bodies as JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            connection.request(method, path, content, {**kind, **(headers or {})})
            response = connection.getresponse()
            return HttpResponse(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
            )

    def post(self, path: str, body: Any, **headers: str) -> HttpResponse:
        return self.send("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the engine, so that its requests do not finish."""
        engine = self._engine
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    @property
    def _engine(self) -> int:
        forked = [line for line in self.log if line.startswith(FORKED_PREFIX)]
        if forked:
            return int(forked[-1].removeprefix(FORKED_PREFIX))
        children = psutil.Process(self.process.pid).children()
        (engine,) = [int(child.pid) for child in children if has_role(child, "engine")]
        return engine

    def stop(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def serving(
    folder: Path,
    *flags: str,
    environ: dict[str, str] | None = None,
    has_hub: bool = False,
    has_adapters: bool = True,
    from_scratch: bool = False,
    **settings: float,
) -> Iterator[Server]:
    """Run `lorax serve` with the folder's model and adapters. Show its log if the server does not become ready.

    The engine is forked from the fork server (`forks`) if there is one, unless `from_scratch` is set. A forked engine
    does not receive `environ`. `settings` are config fields that have no flag.
    """
    adapters = ["--adapters-dir", str(folder / "adapters")] if has_adapters else []
    arguments = ["--model-id", str(folder / "model"), *adapters, "--port", "0"]
    forks_at = forkserver._forkserver._forkserver_address or ""  # type: ignore[attr-defined]
    address = "" if from_scratch else forks_at
    program = ["-m", "tests.e2e.command", json.dumps(settings), address]
    hub = [] if has_hub else ["--no-hub"]
    command = [sys.executable, *program, "serve", *arguments, *hub, *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    log: list[str] = []
    url: list[str] = []
    has_answer = threading.Event()
    reader = threading.Thread(target=read_log, args=(process, log, url, has_answer))
    reader.start()
    try:
        has_answer.wait(START_TIMEOUT_S)
        assert url, f"{' '.join(command)} did not start:\n{''.join(log)}"
        yield Server(process, url[0], log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join()
            assert process.stderr is not None
            process.stderr.close()


def read_log(process: "subprocess.Popen[str]", log: list[str], url: list[str], has_answer: threading.Event) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        result = READY.search(line)
        if result and not url:
            url.append(result[1])
            has_answer.set()
    has_answer.set()


def ids_of(prompts: Sequence[str]) -> list[list[int]]:
    tokenizer = make_tokenizer()
    return [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
