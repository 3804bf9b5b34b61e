"""Conversion of tokenizers that only transformers can read, each in a process of its own that can be ended."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from lorax_server.errors import ConfigError
from lorax_server.text.chat_template import ENVIRONMENT

CONVERT_S = 60.0
MAX_LOG_BYTES = 2**12  # of the end of a converter's output


class Converter:
    """Starts a process for each conversion. Any thread may use it, and any may close it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def close(self) -> None:
        """End all conversions. Callers that wait get an error, and so do later ones."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def convert(self, folder: Path, out: Path, model_config: Path | None) -> None:
        """Write the converted files to `out`. Takes `CONVERT_S` at most."""
        command = [sys.executable, "-m", "lorax_server.text.conversion_program", str(folder.absolute()), str(out)]
        command += [] if model_config is None else [str(model_config.absolute())]
        try:
            status = self._run(command, out)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{folder}: its tokenizer takes longer than {CONVERT_S:g} s to convert") from error
        if self._is_closed:
            raise ConfigError(f"{folder}: the server is stopping, no tokenizer is converted any more")
        if status != 0:
            reason = _read_last_line(out / "log.txt") or f"exit status {status}"
            raise ConfigError(f"{folder}: no tokenizer that can be read: {reason[:500]}")

    def _run(self, command: list[str], out: Path) -> int:
        """Return the exit status. Output goes to a file: a pipe could bring more than there is memory for."""
        with (out / "log.txt").open("wb") as log, self._launch(command, out, log.fileno()) as process:
            try:
                return process.wait(CONVERT_S)
            finally:
                process.kill()
                with self._lock:
                    self._running.remove(process)

    def _launch(self, command: list[str], out: Path, log: int) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {"HOME": str(out), "TMPDIR": str(out), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["TIKTOKEN_CACHE_DIR"] = ""  # tiktoken would keep a copy
        with self._lock:
            if self._is_closed:
                raise ConfigError("the server is stopping, no tokenizer is converted any more")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            self._running.add(process)
        return process


def _read_last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_LOG_BYTES, 0))
        lines = file.read(MAX_LOG_BYTES).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
