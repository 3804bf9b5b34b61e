"""Engines, servers and clients that stop during requests, with real processes, sockets and signals."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.e2e.gated_engine_process import starting
from tests.e2e.http_server import Server, serving, write_model
from tests.e2e.streaming_client import (
    CHAT,
    COMPLETIONS,
    NATIVE,
    RST,
    WAIT_TIMEOUT_S,
    Client,
    children,
    close_all,
    count_logged,
    engine_metrics,
    get,
    is_idle,
    is_successful,
    metrics,
    native,
    num_unfinished,
    openai,
    resident_bytes,
    tokens_of,
    usage,
    wait_for,
)

pytestmark = pytest.mark.slow

MAX_NUM_SEQS = 16
ADAPTER = "owner/adapter"


# --- A server with a real engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a long context."""
    folder = tmp_path_factory.mktemp("long")
    write_model(folder)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[HubServer]:
    with running(HubServer()) as server:
        files = {path.name: path.read_bytes() for path in (folder / "adapters" / "first").iterdir()}
        server.repos[ADAPTER] = Repo(files)
        yield server


@pytest.fixture(scope="module")
def server(folder: Path, hub: HubServer) -> Iterator[Server]:
    flags = (
        "--max-num-seqs",
        str(MAX_NUM_SEQS),
        "--cache-bytes",
        "16M",
        "--hub-endpoint",
        hub.url,
        "--hub",
        "--drain-s",
        "1",
    )
    with serving(folder, *flags, "--huggingface-hub-cache", str(folder / "cache"), from_scratch=True) as server:
        yield server


def test_log_reports_engine_start_and_memory(server: Server) -> None:
    lines = [line for line in server.log if "started in" in line or "memory: weights" in line]
    assert [line.split()[1:3] for line in lines] == [
        ["INFO", "lorax_server.worker.memory"],
        ["INFO", "lorax_server.build"],
    ]


def test_killed_engine_fails_streams_and_restarts(server: Server) -> None:
    first = {"adapter_id": "first", "adapter_source": "local"}
    with closing(Client(server, NATIVE, native(60, **first))) as client:
        before = tokens_of(client.events())
    messages = [{"role": "user", "content": "hello"}]
    bodies = {
        "native": (NATIVE, native(4000)),
        "adapter": (NATIVE, native(4000, **first)),
        "compat": ("/", native(4000) | {"stream": True}),
        "completion": (COMPLETIONS, openai(4000, n=2)),
        "chat": (CHAT, openai(4000, messages=messages)),
    }
    engine = children(server.process.pid)["engine"]
    with ExitStack() as stack:
        with server.paused():  # or the first stream might finish before the last one starts
            clients = [Client(server, path, body, x_request_id=name) for name, (path, body) in bodies.items()]
            clients.append(Client(server, "/generate", native(4000), x_request_id="whole"))
            *streams, whole = stack.enter_context(close_all(*clients))
            wait_for(lambda: num_unfinished(metrics(server)) == len(clients), "all have come")
        events = [stream.events() for stream in streams]
        for each in events:
            assert "error" not in next(each)
        wait_for(lambda: engine_metrics(server)["lorax_batch_current_size"] == len(bodies) + 2, "all of them run")
        os.kill(engine, signal.SIGKILL)
        for (path, _), each in zip(bodies.values(), events, strict=True):
            *_, last = each  # without [DONE]
            message = last["error"]["message"] if path.startswith("/v1") else last["error"]
            assert "the engine process exited (exit code -9, SIGKILL); the engine is restarting" in message
        assert whole.status == 503
    with next_engine_paused(server, engine):
        check_is_down(server)

    wait_for(lambda: get(server, "/health")[0] == 200, "the engine comes back")
    with closing(Client(server, NATIVE, native(60, **first))) as client:
        assert tokens_of(client.events()) == before
    wait_for(lambda: all(count_logged(server, name) for name in (*bodies, "whole")), "all are logged")
    assert all(count_logged(server, name) == 1 for name in (*bodies, "whole"))


@contextmanager
def next_engine_paused(server: Server, engine: int) -> Iterator[None]:
    """Pause the process that replaces an engine before it is ready."""
    wait_for(lambda: children(server.process.pid).get("engine", engine) != engine, "another engine starts")
    new = children(server.process.pid)["engine"]
    os.kill(new, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(new, signal.SIGCONT)


def check_is_down(server: Server) -> None:
    """Check that every route reports the missing engine."""
    status, text = get(server, "/health")
    assert (status, json.loads(text)) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
    for path, body in (("/generate", native(1)), (NATIVE, native(1)), (COMPLETIONS, openai(1))):
        with closing(Client(server, path, body)) as client:
            assert client.status == 503
            assert int(client.response.headers["retry-after"]) >= 1
            assert "is restarting" in str(client.json()["error"])
    assert "lorax_engine_healthy 0.0" in get(server, "/metrics")[1]


def disconnect_clients(server: Server, count: int) -> None:
    """Open requests whose clients disconnect at different times, half of them with a TCP reset.

    The engine is paused while the last clients disconnect, until the API process has aborted all requests.
    """
    clients = []
    for i in range(count):
        path, body = ((NATIVE, native), (COMPLETIONS, openai), ("/generate", native))[i // 2 % 3]
        client = Client(server, path, body(3000))
        if i < MAX_NUM_SEQS and path != "/generate":
            next(client.events())
        if i % 3 == 0:
            client.close(RST if i % 2 else None)  # before the first event
        clients.append(client)
    with server.paused():
        for i, client in enumerate(clients):  # running or queued
            client.close(RST if i % 2 else None)
        wait_for(lambda: num_unfinished(metrics(server)) == 0, "the API process has aborted all requests")


def test_disconnected_clients_leak_no_resources(server: Server) -> None:
    disconnect_clients(server, 40)  # warm-up: allocate one-time resources
    wait_for(lambda: is_idle(server), "the first ones are gone")
    pids = (server.process.pid, children(server.process.pid)["engine"])
    before, old = [usage(pid) for pid in pids], engine_metrics(server)
    memory = sum(map(resident_bytes, pids))

    disconnect_clients(server, 200)
    steps = engine_metrics(server)["lorax_engine_steps_total"]  # ordered after all aborts
    wait_for(lambda: is_idle(server), "all are gone")
    new = engine_metrics(server)
    assert new["lorax_engine_steps_total"] - steps <= 2  # the running step, and possibly one more
    assert new["lorax_kv_blocks_free"] == old["lorax_kv_blocks_free"] == new["lorax_kv_blocks"]
    wait_for(lambda: all(now <= then for now, then in zip(map(usage, pids), before, strict=True)), "files, threads")
    assert sum(map(resident_bytes, pids)) - memory < 32 * 2**20
    with closing(Client(server, "/generate", native(5))) as client:
        assert client.status == 200


def test_slow_reader_does_not_block_streams_and_gets_all_events(server: Server) -> None:
    names = [f"slow-{i}" for i in range(6)]
    body = native(900, details=True, return_k_alternatives=20)  # larger than the socket buffers
    with close_all(*(Client(server, NATIVE, body, is_slow=True, x_request_id=name) for name in names)) as slow:
        with close_all(*(Client(server, NATIVE, native(40)) for _ in range(20))) as fast:
            responses = [tokens_of(client.events()) for client in fast]
        wait_for(lambda: is_idle(server), "the engine has done with the slow ones too")
        assert not any(count_logged(server, name) for name in names)  # blocked by the slow reader
        expected = tokens_of(slow[0].events())
        assert len(expected) == 900
        assert responses == [expected[:40]] * 20
        for client in slow[1:]:
            assert tokens_of(client.events()) == expected


def test_request_timeout_header_limits_queue_time(server: Server) -> None:
    with close_all(*(Client(server, NATIVE, native(4000)) for _ in range(MAX_NUM_SEQS))) as long:
        for client in long:
            next(client.events())
        with server.paused():  # so that no stream finishes and frees a slot
            for path, body in ((NATIVE, native(5)), ("/generate", native(5)), (COMPLETIONS, openai(5))):
                with closing(Client(server, path, body, x_request_timeout="0.2")) as client:
                    assert client.status == 504
                    assert "the request timed out after 0.2 s" in str(client.json()["error"])
    with closing(Client(server, "/generate", native(4000), x_request_timeout="0.2")) as client:
        assert (client.status, client.json()["error_type"]) == (504, "timeout")
    for asked in ("0", "-1", "nan", "inf", "soon"):
        with closing(Client(server, "/generate", native(1), x_request_timeout=asked)) as client:
            assert client.status == 422
    wait_for(lambda: is_idle(server), "what is given up is not computed")


def test_full_disk_fails_only_adapter_downloads(server: Server, hub: HubServer, folder: Path) -> None:
    """Simulate a full disk with a file size limit."""
    engine = children(server.process.pid)["engine"]
    weights = max(len(content) for content in hub.repos[ADAPTER].files.values())
    body, spoken = native(20, adapter_id=ADAPTER), openai(5, model=ADAPTER)
    other = native(20, adapter_id="second", adapter_source="local")
    with closing(Client(server, NATIVE, native(4000))) as going:
        events = going.events()
        next(events)
        before = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (weights - 1, before[1]))
        for path, asked, status in ((NATIVE, body, 424), ("/generate", body, 424), (COMPLETIONS, spoken, 503)):
            with closing(Client(server, path, asked)) as client:
                assert client.status == status
                assert int(client.response.headers["retry-after"]) >= 1
                assert "the server cannot store it (File too large); free disk space for its cache" in str(
                    client.json()
                )
        assert not list((folder / "cache").rglob("*.part"))
        with closing(Client(server, "/generate", other)) as client:
            assert client.status == 200
        assert "error" not in next(events)
    resource.prlimit(engine, resource.RLIMIT_FSIZE, before)
    wait_for(lambda: is_successful(server, "/generate", body), "it is tried again after a while")
    with closing(Client(server, NATIVE, body)) as client:
        fetched = tokens_of(client.events())
    with closing(Client(server, NATIVE, native(20, adapter_id="first", adapter_source="local"))) as client:
        assert tokens_of(client.events()) == fetched


# --- Servers that end, with an engine that takes as long as a test wants ----------------------------------------------


@contextmanager
def gated(folder: Path, tmp_path: Path, drain_s: float) -> Iterator[Server]:
    with starting(folder / "model", tmp_path / "gate", drain_s) as (process, log, url):
        assert url, "".join(log)
        assert children(process.pid).keys() >= {"engine", "sandbox"}
        yield Server(process, url[0], log)


@contextmanager
def open_streams(server: Server, count: int) -> Iterator[list[Iterator[Any]]]:
    """Open streams that have sent their first event."""
    asked = ((NATIVE, native(count)), (COMPLETIONS, openai(count))) * 2
    with close_all(*(Client(server, path, body) for path, body in asked)) as clients:
        events = [client.events() for client in clients]
        for each in events:
            next(each)
        yield events


def send_stop_signal(server: Server, how: signal.Signals = signal.SIGTERM) -> None:
    server.process.send_signal(how)
    wait_for(lambda: any("shutting down:" in line for line in server.log), "the shutdown is logged")


def check_rejects_new_requests(server: Server) -> None:
    """Check that new requests are rejected until the port is closed."""
    is_open = True
    while is_open:
        try:
            with closing(Client(server, "/generate", native(1))) as client:
                assert client.status == 503
        except ConnectionError:
            is_open = False


def check_last_events(events: list[Iterator[Any]], *, with_error: bool) -> None:
    """Check the last event of each stream."""
    for i, each in enumerate(events):
        *_, last = each
        if with_error:
            assert "the server is shutting down" in str(last["error"])
        else:
            assert last == "[DONE]" if i % 2 else last["generated_text"]


def test_running_streams_finish_during_drain(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path, drain_s=600) as server, open_streams(server, 50) as events:
        with closing(Client(server, "/generate", native(50))) as whole:
            wait_for(lambda: metrics(server)["lorax_request_count"] == 5, "the last one is in")
            send_stop_signal(server)
            check_rejects_new_requests(server)
            assert server.process.poll() is None
            (tmp_path / "gate").touch()
            check_last_events(events, with_error=False)
            assert whole.status == 200
        assert server.process.wait(WAIT_TIMEOUT_S) == 0


@pytest.mark.slow
def test_drain_timeout_fails_remaining_streams(folder: Path, tmp_path: Path) -> None:
    lost = native(5, adapter_id="somewhere", adapter_source="local")  # never found by this engine
    with gated(folder, tmp_path, drain_s=1) as server, open_streams(server, 5000) as events:
        with close_all(Client(server, "/generate", native(5000)), Client(server, NATIVE, lost)) as waiting:
            wait_for(lambda: metrics(server)["lorax_request_count"] == 6, "all are in")
            send_stop_signal(server, signal.SIGINT)
            check_last_events(events, with_error=True)
            for client in waiting:
                assert client.status == 503
                assert "the server is shutting down" in client.json()["error"]
        assert server.process.wait(WAIT_TIMEOUT_S) == 0


@pytest.mark.slow
def test_second_signal_stops_server_immediately(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path, drain_s=600) as server, open_streams(server, 5000):
        send_stop_signal(server)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(WAIT_TIMEOUT_S) == 0


def test_stream_past_deadline_fails_with_error_event(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path, drain_s=1) as server:
        bodies = (
            (NATIVE, native(9)),
            (COMPLETIONS, openai(9)),
            (COMPLETIONS, openai(9, n=2)),
            ("/generate", native(9)),
        )
        for timeout_s in (1, 4, 16, 64):
            asked = [Client(server, path, body, x_request_timeout=str(timeout_s)) for path, body in bodies]
            with close_all(*asked) as (*streams, whole):
                if any(client.status == 504 for client in streams):
                    continue  # a busy machine may not have generated the first token
                for client in streams:
                    *some, last = client.events()
                    assert some
                    assert f"the request timed out after {timeout_s} s" in str(last["error"])
                assert (whole.status, whole.json()["error_type"]) == (504, "timeout")
                break
        else:
            pytest.fail("no stream has started in time")
        server.process.terminate()


@pytest.mark.slow
def test_killed_server_leaves_no_processes(folder: Path, tmp_path: Path) -> None:
    with gated(folder, tmp_path, drain_s=600) as server, open_streams(server, 5000):
        server.process.kill()
        assert server.process.wait(WAIT_TIMEOUT_S) == -signal.SIGKILL
