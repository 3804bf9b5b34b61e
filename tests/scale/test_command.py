"""`lorax serve --replicas` with a temporary Ray cluster."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from lorax_server import cli
from tests.e2e.http_server import READY, import_path
from tests.e2e.streaming_client import WAIT_TIMEOUT_S, wait_for
from tests.scale.cluster import generate


def test_invalid_replica_count_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--replicas", "0"]) == 2
    assert "--replicas = 0 must be at least 1" in capsys.readouterr().err
    assert cli.main(["serve", "--replicas", "x"]) == 2
    assert "is not a whole number" in capsys.readouterr().err


@contextmanager
def serving(*flags: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--replicas", "2", "--port", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
        environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
        )
        assert process.stdout is not None
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.slow
def test_replicas_are_served_and_stopped() -> None:
    with serving("--device", "cpu") as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        ready = READY.search(lines[-1])
        assert ready, "".join(lines)
        assert "with 2 replicas" in lines[-1]
        assert generate(int(ready[1].rsplit(":", 1)[1]), "pirate")[0]
        started = psutil.Process(process.pid).children(recursive=True)
        assert {each.nice() for each in started if each.name().startswith("ray::")} == {psutil.Process().nice()}
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(WAIT_TIMEOUT_S) == 0
        wait_for(lambda: not any(map(psutil.Process.is_running, started)), "no process stays")


@pytest.mark.slow
def test_missing_model_is_reported_on_last_line() -> None:
    with serving("--model-id", "/nowhere/at/all", "--device", "cpu", "--hub-offline") as process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(WAIT_TIMEOUT_S) == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("lorax: the replica's server could not start: lorax: ")
    assert "/nowhere/at/all" in last
