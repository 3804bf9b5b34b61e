"""Tokenizers that only transformers can read are converted by it, each in a process of its own that can be ended."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from lorax_server.errors import ConfigError
from lorax_server.text.chat_template import ENVIRONMENT

CONVERT_S = 60.0
MAX_SAID = 2**12  # bytes of what a converter says at last


class Converter:
    """Asks other processes to convert, each for one tokenizer. Any thread may use it, and any may close it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def close(self) -> None:
        """End what runs: whoever waits for it gets an error, and so does who comes later."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def convert(self, folder: Path, out: Path, model_config: Path | None) -> None:
        """It waits until `out` has the files, for `CONVERT_S` at most."""
        command = [sys.executable, "-m", "lorax_server.text.conversion_program", str(folder.absolute()), str(out)]
        command += [] if model_config is None else [str(model_config.absolute())]
        try:
            status = self._run(command, out)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{folder}: its tokenizer takes longer than {CONVERT_S:g} s to convert") from error
        if self._is_closed:
            raise ConfigError(f"{folder}: the server is stopping, no tokenizer is converted any more")
        if status != 0:
            why = _last_line(out / "said.txt") or f"exit status {status}"
            raise ConfigError(f"{folder}: no tokenizer that can be read: {why[:500]}")

    def _run(self, command: list[str], out: Path) -> int:
        """The exit status. What it says goes to a file: a pipe could bring more than there is memory for."""
        with (out / "said.txt").open("wb") as said, self._launch(command, out, said.fileno()) as process:
            try:
                return process.wait(CONVERT_S)
            finally:
                process.kill()
                with self._lock:
                    self._running.remove(process)

    def _launch(self, command: list[str], out: Path, said: int) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {"HOME": str(out), "TMPDIR": str(out), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["TIKTOKEN_CACHE_DIR"] = ""  # it would keep a copy
        with self._lock:
            if self._is_closed:
                raise ConfigError("the server is stopping, no tokenizer is converted any more")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
            )
            self._running.add(process)
        return process


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_SAID, 0))
        lines = file.read(MAX_SAID).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
