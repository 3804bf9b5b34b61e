"""Several API processes in front of one engine: real processes and sockets, and what happens when one of them ends."""

import hashlib
import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.command import FORKED
from tests.e2e.http_server import Server, serving, write_model
from tests.e2e.started import starting
from tests.e2e.wire import (
    COMPLETIONS,
    NATIVE,
    PATIENCE_S,
    Client,
    all_of,
    engine_metrics,
    get,
    metrics,
    native,
    openai,
    tokens_of,
    wait_for,
)

WORKERS, RATE = 2, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    write_model(folder)
    return folder


# --- State that is one for all ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    keys = folder / "keys.json"
    limited = {"sha256": hashlib.sha256(b"limited").hexdigest(), "requests_per_minute": RATE}
    free = {"sha256": hashlib.sha256(b"the-free").hexdigest()}
    keys.write_text(json.dumps({"keys": {"limited": limited, "free": free}}))
    flags = ("--api-workers", str(WORKERS), "--keys-file", str(keys), "--admin-key", "the-admins")
    with serving(folder, *flags, "--cache-bytes", "4M", "--max-total-tokens", "64") as server:
        yield server


class Each:
    """A connection to each worker: of two that are open, each worker has one."""

    def __init__(self, server: Server) -> None:
        self._all = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(WORKERS)]
        for connection in self._all:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    def send(self, worker: int, method: str, path: str, body: Any = None, key: str = "the-free") -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection = self._all[worker]
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(content) if is_json else content.decode()


@pytest.fixture
def each(server: Server) -> Iterator[Each]:
    wait_for(lambda: metrics(server)["lorax_connections"] == 1, "no connection is left but that of the question")
    with closing(Each(server)) as each:
        yield each


def test_the_two_connections_are_with_two_processes(server: Server, each: Each) -> None:
    assert metrics(server)["lorax_api_workers"] == WORKERS
    forked = [int(line.removeprefix(FORKED)) for line in server.log if line.startswith(FORKED)]
    assert sorted(count_connections(pid, server.port) for pid in forked) == [0, 1, 1]  # the engine has none


def test_answers_and_descriptions_are_the_same_whoever_gives_them(each: Each) -> None:
    for path in ("/info", "/v1/models", "/v1/models/first", "/v1/adapters", "/openapi.json"):
        first, second = (each.send(worker, "GET", path) for worker in range(WORKERS))
        assert first == second
        assert first[0] == 200
    for body in (native(8), native(8, adapter_id="first", do_sample=True, seed=3)):
        first, second = (each.send(worker, "POST", "/generate", body) for worker in range(WORKERS))
        assert (first, first[0]) == (second, 200)
    for body in (openai(8, stream=False, temperature=0), openai(8, stream=False, temperature=0, model="second")):
        answers = [each.send(worker, "POST", COMPLETIONS, body) for worker in range(WORKERS)]
        assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
        assert len({answer["id"] for _, answer in answers}) == WORKERS


def test_a_name_that_one_gives_all_know_at_once(each: Each) -> None:
    for round in range(10):
        name, (giver, taker) = f"mine-{round}", ((0, 1) if round % 2 else (1, 0))
        given = {"adapter_id": "first", "adapter_source": "local", "name": name}
        assert each.send(giver, "POST", "/v1/adapters/load", given, "the-admins")[0] == 200
        assert each.send(taker, "GET", f"/v1/models/{name}")[0] == 200
        assert each.send(taker, "POST", "/generate", native(2, adapter_id=name))[0] == 200
        assert each.send(taker, "POST", "/v1/adapters/unload", {"adapter_id": name}, "the-admins")[0] == 200
        assert each.send(giver, "GET", f"/v1/models/{name}")[0] == 404


def test_an_adapter_that_one_has_found_can_be_unloaded_by_the_other(each: Each) -> None:
    assert each.send(0, "POST", "/generate", native(2, adapter_id="second"))[0] == 200
    status, listed = each.send(1, "POST", "/v1/adapters/unload", {"adapter_id": "second"}, "the-admins")
    assert status == 200
    for page in (listed, each.send(0, "GET", "/v1/adapters")[1]):
        assert {one["id"]: one["state"] for one in page["data"]}["second"] == "on disk"


def test_a_refused_name_is_refused_by_the_parent_with_the_same_words(each: Each) -> None:
    for name in ("lorax\n", "x" * 2000):
        given = {"lora_name": name, "lora_path": "first"}
        answers = [each.send(worker, "POST", "/v1/load_lora_adapter", given, "the-admins") for worker in range(WORKERS)]
        assert answers[0] == answers[1]
        assert answers[0][0] == 400
        assert "printable characters" in str(answers[0][1])


def test_text_that_is_none_is_the_callers_mistake(each: Each) -> None:
    for worker in range(WORKERS):
        status, answer = each.send(worker, "POST", "/generate", native(2, adapter_id="\ud800", adapter_source="local"))
        assert (status, answer["error_type"]) == (422, "validation")
        assert each.send(worker, "POST", "/generate", native(2))[0] == 200


def test_a_folder_that_comes_later_is_known_to_all(folder: Path, each: Each) -> None:
    shutil.copytree(folder / "adapters" / "first", folder / "adapters" / "later")
    try:
        for worker in range(WORKERS):
            wait_for(lambda at=worker: each.send(at, "GET", "/v1/models/later")[0] == 200, "it is listed")  # type: ignore[misc]
    finally:
        shutil.rmtree(folder / "adapters" / "later")
    for worker in range(WORKERS):
        wait_for(lambda at=worker: each.send(at, "GET", "/v1/models/later")[0] == 404, "it is gone")  # type: ignore[misc]


def test_the_rate_of_a_key_is_that_of_all_workers_together(each: Each) -> None:
    start = time.monotonic()
    asked = [each.send(turn % WORKERS, "POST", "/tokenize", {"inputs": "a"}, "limited") for turn in range(2 * RATE)]
    statuses = [status for status, _ in asked]
    refilled = (time.monotonic() - start) * RATE / 60  # a busy machine takes seconds
    assert statuses[:RATE] == [200] * RATE
    assert statuses.count(429) >= RATE - 1 - refilled
    assert "used up its 30 requests a minute" in str(asked[-1][1])


def test_one_scrape_counts_the_requests_of_all(server: Server, each: Each) -> None:
    before = [metrics(server), metrics(server)]
    for turn in range(6):
        body = native(3, adapter_id="first")
        assert each.send(turn % WORKERS, "POST", "/generate", body)[0] == 200
        for worker in range(WORKERS):  # at once, and at any worker
            text = each.send(worker, "GET", "/metrics")[1]
            assert f"lorax_request_success {before[0]['lorax_request_success'] + turn + 1}" in text
    wait_for(lambda: metrics(server)["lorax_connections"] == WORKERS + 1, "the first two scrapes are closed")
    after = metrics(server)
    name = 'lorax_adapter_tokens_total{adapter="first",kind="generated"}'
    assert after[name] - before[0].get(name, 0) == 18
    assert after["lorax_connections"] == WORKERS + 1
    status, answer = each.send(0, "GET", "/nowhere")
    assert (status, answer["error_type"]) == (404, "not_found")
    assert metrics(server)["lorax_request_count"] == after["lorax_request_count"] + 1


# --- Workers that end, with an engine that takes as long as a test wants ----------------------------------------------


def workers_of(server: Server) -> list[int]:
    """Return the process ids of the API workers: each has a sandbox, the engine has none."""
    spawned = [child for child in psutil.Process(server.process.pid).children(recursive=True) if is_worker(child)]
    return sorted(child.pid for child in spawned)


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("lorax_server.sandbox.worker" in child.cmdline() for child in process.children())
    except psutil.NoSuchProcess:
        return False


def count_connections(pid: int, port: int) -> int:
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in connections)


@contextmanager
def gated(folder: Path, gate: Path, drain_s: float = 600) -> Iterator[Server]:
    with starting(folder / "model", gate, drain_s, WORKERS) as (process, log, url):
        assert url, "".join(log)
        yield Server(process, url[0], log)


@contextmanager
def streams(server: Server, count: int, tokens: int) -> Iterator[list[Iterator[Any]]]:
    """Open streams that have begun and pause; each worker has as many as the other."""
    with all_of(*(Client(server, NATIVE, native(tokens)) for _ in range(count))) as clients:
        events = [client.events() for client in clients]
        for each in events:
            next(each)
        yield events


def test_a_worker_that_is_killed_is_replaced_and_others_notice_nothing(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(folder, gate, drain_s=5) as server:
        before = workers_of(server)
        assert len(before) == WORKERS
        with streams(server, 6, 50) as events:
            assert engine_metrics(server)["lorax_batch_current_size"] == 6
            os.kill(before[0], signal.SIGKILL)
            wait_for(lambda: metrics(server)["lorax_batch_current_size"] == 3, "its streams are aborted")
            assert get(server, "/health")[0] == 200
            wait_for(lambda: metrics(server)["lorax_api_workers"] == WORKERS, "another takes its place")
            now = workers_of(server)
            assert before[1] in now
            assert before[0] not in now
            with streams(server, 3, 50) as more:  # also of the new one
                gate.touch()
                ended = [count_tokens(each) for each in (*events, *more)]
            assert sorted(ended) == [0] * 3 + [49] * 6
            assert metrics(server)["lorax_api_workers_replaced_total"] == 1
        assert any("(exit code -9, SIGKILL); its streams are lost" in line for line in server.log)
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0


def count_tokens(events: Iterator[Any]) -> int:
    """Count the tokens that are left of a stream; 0 if it was cut off, or ended with an error."""
    try:
        left = list(events)
    except (http.client.IncompleteRead, ConnectionError):
        return 0
    return 0 if not left or "error" in left[-1] else len(tokens_of(iter(left)))


def engine_of(server: Server) -> int:
    """Return the engine's process id: the child of the parent that is neither a worker nor a helper of Python's."""
    children = psutil.Process(server.process.pid).children()
    (engine,) = [child for child in children if "spawn_main" in " ".join(child.cmdline()) and not is_worker(child)]
    return int(engine.pid)


@pytest.mark.slow
def test_an_engine_that_dies_ends_all_streams_and_all_workers_find_the_next(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(folder, gate, drain_s=5) as server:
        before, engine = workers_of(server), engine_of(server)
        with streams(server, 4, 30) as events:
            os.kill(engine, signal.SIGKILL)
            ends = [list(each)[-1] for each in events]
        assert {end["error_type"] for end in ends} == {"generation"}
        assert all("the engine" in end["error"] for end in ends)
        wait_for(lambda: metrics(server)["lorax_engine_healthy"] == 1, "it runs again")
        gate.touch()
        with closing(Each(server)) as each:
            for worker in range(WORKERS):
                wait_for(lambda at=worker: each.send(at, "POST", "/generate", native(5))[0] == 200, "it is found")  # type: ignore[misc]
        assert workers_of(server) == before
        assert engine_of(server) != engine
        assert metrics(server)["lorax_engine_restarts_total"] == 1
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_all_workers_let_their_requests_end_and_take_no_more(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(folder, gate) as server, streams(server, 4, 30) as events:
        idle = Each(server)
        server.process.terminate()
        wait_for(lambda: sum("requests may take up to" in line for line in server.log) == WORKERS + 1, "all have heard")
        with pytest.raises(ConnectionRefusedError):
            Client(server, "/generate", native(1))
        assert server.process.poll() is None
        gate.touch()
        assert [count_tokens(each) for each in events] == [29] * 4
        assert server.process.wait(PATIENCE_S) == 0
        idle.close()


@pytest.mark.slow
def test_a_second_signal_ends_all_workers_at_once(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path / "gate") as server, streams(server, 4, 30):
        server.process.terminate()
        wait_for(lambda: sum("requests may take up to" in line for line in server.log) == WORKERS + 1, "all have heard")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_nothing_outlives_a_parent_that_is_killed(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path / "gate") as server, streams(server, 4, 30) as events:
        server.process.kill()
        assert [count_tokens(each) for each in events] == [0] * 4


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_ends_its_streams_first(folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(folder, gate, drain_s=60) as server, streams(server, 4, 30) as events:
        first = psutil.Process(workers_of(server)[0])
        first.terminate()
        wait_for(lambda: metrics(server)["lorax_api_workers"] == WORKERS - 1, "it has asked for no more")
        assert all(get(server, "/health")[0] == 200 for _ in range(4))
        gate.touch()
        assert [count_tokens(each) for each in events] == [29] * 4
        wait_for(lambda: metrics(server)["lorax_api_workers"] == WORKERS, "another takes its place")
        assert not first.is_running()
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_a_clear_error_and_the_end(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    (model / "generation_config.json").write_text('{"temperature": -1}')
    with starting(model, tmp_path / "gate", workers=WORKERS) as (process, log, url):
        assert url == []
        assert process.wait(PATIENCE_S) == 1
    (reason,) = [line for line in log if "ERROR" in line]
    assert "cannot start: generation_config.json: " in reason
    assert "API process" in reason
    assert "Traceback" not in "".join(log)


@pytest.mark.slow
def test_a_place_that_cannot_be_taken_again_stays_empty_and_others_go_on(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    with starting(model, tmp_path / "gate", 5, WORKERS) as (process, log, url):
        server = Server(process, url[0], log)
        (model / "generation_config.json").write_text('{"temperature": -1}')
        with streams(server, 2, 30) as events:
            os.kill(workers_of(server)[0], signal.SIGKILL)
            wait_for(lambda: any("its place stays empty" in line for line in log), "it is given up")
            assert sum("another takes its place" in line for line in log) == 3
            (tmp_path / "gate").touch()
            assert sorted(count_tokens(each) for each in events) == [0, 29]
        assert get(server, "/health")[0] == 200
        os.kill(workers_of(server)[0], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    assert any("no API process is left" in line for line in log)
