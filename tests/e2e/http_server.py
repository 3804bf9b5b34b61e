"""A real server for tests: the command, its processes, a socket, with a tiny model and its adapters in folders."""

import copy
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.parity.test_engine import write_adapter
from tests.parity.variants import VARIANTS
from tests.tokenizers import byte_level

ROOT = Path(__file__).parent.parent.parent
READY = re.compile(r"ready: (http://\S+)")
START_S = 120
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
    """A tiny model of one architecture with a tokenizer, and two adapters beside it; transformers' model."""
    tokenizer = make_tokenizer()
    config = VARIANTS[name].config()
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
    for adapter, rank in RANKS.items():
        write_adapter(copy.deepcopy(model), name, rank, folder / "adapters" / adapter)
    return model


class Server:
    """One that runs."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def serving(folder: Path, *flags: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """`lorax serve` with the folder's model and adapters, until it is left. Its log is shown if it never gets ready."""
    arguments = ["--model-id", str(folder / "model"), "--adapters-dir", str(folder / "adapters"), "--port", "0"]
    command = [sys.executable, "-m", "lorax_server.cli", "serve", *arguments, "--no-hub", *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    log: list[str] = []
    url: list[str] = []
    has_answer = threading.Event()
    reader = threading.Thread(target=_read, args=(process, log, url, has_answer))
    reader.start()
    try:
        has_answer.wait(START_S)
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


def _read(process: "subprocess.Popen[str]", log: list[str], url: list[str], has_answer: threading.Event) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        found = READY.search(line)
        if found and not url:
            url.append(found[1])
            has_answer.set()
    has_answer.set()


def ids_of(prompts: Sequence[str]) -> list[list[int]]:
    tokenizer = make_tokenizer()
    return [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
