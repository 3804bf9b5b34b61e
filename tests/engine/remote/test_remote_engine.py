"""The client with real processes and sockets, and a fake engine that repeats prompts."""

import asyncio
import fcntl
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from lorax_server.engine.remote import channel as channel_module
from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import ClientChannel, describe_exit
from lorax_server.engine.remote.remote_engine import (
    MAX_RESTART_DELAY_S,
    STABLE_AFTER_S,
    RemoteEngine,
    next_restart_delay_s,
)
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    EngineError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.types import (
    AdapterRef,
    AdapterState,
    Failure,
    FinishReason,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
    SampledToken,
    SamplingParams,
    StopParams,
)
from tests.engine.fake_engine import FakeConfig, fake_info, fake_target, make_fake_request

ROOT = Path(__file__).parents[3]
GUARD_S = 60
Test = Callable[[RemoteEngine], Awaitable[None]]

logging.getLogger("lorax_server.engine.remote.remote_engine").setLevel(logging.CRITICAL)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder with one file per engine. The test must leave no socket or process."""
    with tempfile.TemporaryDirectory() as whole:  # not `tmp_path`, which is too long for a socket
        starts, sockets = Path(whole, "s"), Path(whole, "t")
        starts.mkdir()
        sockets.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(sockets))
        before = set(multiprocessing.active_children())
        yield starts
        assert list(sockets.iterdir()) == []
        assert set(multiprocessing.active_children()) == before


def run_with(config: FakeConfig, test: Test, restart: bool = True) -> None:
    async def run() -> None:
        client = RemoteEngine(fake_target, config, restart=restart, first_delay_s=0.001)
        async with asyncio.timeout(GUARD_S):
            await client.start()
            try:
                await test(client)
            finally:
                await client.close()
        wait_for_end(config.folder)

    asyncio.run(run())


def wait_for_end(folder: str | Path) -> None:
    """Wait until all engines have exited, using the locks on their files, and check for zombies."""
    for path in Path(folder).iterdir():
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ChildProcessError):
            os.waitpid(int(path.name.split("-")[1]), os.WNOHANG)


async def read(client: RemoteEngine, request: Request) -> list[int]:
    return [output.tokens[0].token_id async for output in client.generate(request)]


async def pid_of(client: RemoteEngine) -> int:
    return int((await client.resolve([AdapterRef("pid", "")])).identity)


async def until_healthy(client: RemoteEngine) -> None:
    while not client.is_healthy:
        await asyncio.sleep(0.005)


async def aborted(client: RemoteEngine, request_id: int) -> None:
    """Wait until the engine has received an abort."""
    await client.resolve([AdapterRef("aborted", str(request_id))])


# --- Shared engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Test], None]]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        client = RemoteEngine(fake_target, FakeConfig(folder))
        runner.run(client.start())

        async def run_program(test: Test) -> None:
            async with asyncio.timeout(GUARD_S):
                await test(client)
                assert client._streams == {}
                assert client._queries == {}

        yield lambda test: runner.run(run_program(test))
        runner.run(client.close())
        assert len(list(Path(folder).iterdir())) == 1  # no restarts


Shared = Callable[[Test], None]


def test_request_streams_tokens(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request_id = client.new_id()
        outputs = [output async for output in client.generate(make_fake_request(request_id, [5, 6]))]
        assert outputs == [
            Output(request_id, (SampledToken(5, -0.5),)),
            Output(request_id, (SampledToken(6, -0.5),), FinishReason.EOS_TOKEN),
        ]

    shared(test)


def test_concurrent_requests_get_their_tokens(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        prompts = [list(range(number, number + 1 + number % 30)) for number in range(200)]
        requests = [make_fake_request(client.new_id(), prompt) for prompt in prompts]
        assert await asyncio.gather(*(read(client, request) for request in requests)) == prompts

    shared(test)


def test_slow_reader_does_not_delay_streams_or_lose_outputs(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        slow = client.generate(make_fake_request(client.new_id(), range(100)))
        first = await anext(slow)
        for _ in range(3):
            assert await read(client, make_fake_request(client.new_id(), range(100))) == list(range(100))
        assert [first.tokens[0].token_id] + [output.tokens[0].token_id async for output in slow] == list(range(100))

    shared(test)


def test_closing_stream_aborts_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = make_fake_request(client.new_id(), how="hang")
        stream = client.generate(request)
        assert (await anext(stream)).tokens[0].token_id == 1
        await stream.aclose()
        await aborted(client, request.request_id)

    shared(test)


def test_cancellation_aborts_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = make_fake_request(client.new_id(), how="hang")
        reading = asyncio.create_task(read(client, request))
        while request.request_id not in client._streams:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        assert reading.cancelled()
        await aborted(client, request.request_id)

    shared(test)


def test_garbage_collected_stream_aborts_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = make_fake_request(client.new_id(), how="hang")
        async for _ in client.generate(request):
            break
        await aborted(client, request.request_id)

    shared(test)


def test_abort_ends_stream(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = make_fake_request(client.new_id(), how="hang")
        tokens = []
        async for output in client.generate(request):
            tokens.append(output.tokens[0].token_id)
            client.abort(request.request_id)
        assert tokens == [1]
        await aborted(client, request.request_id)
        client.abort(request.request_id)  # a second abort has no effect

    shared(test)


def test_finished_request_is_not_aborted(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = make_fake_request(client.new_id())
        await read(client, request)
        looking = asyncio.create_task(aborted(client, request.request_id))
        await client.status()  # follows all previous messages
        await client.status()
        assert not looking.done()
        looking.cancel()
        await asyncio.wait((looking,))

    shared(test)


@pytest.mark.parametrize(
    ("how", "kind", "status", "message", "retry_after_s"),
    [
        ("refused", OverloadedError, 429, "too much", 7.5),
        ("failed", AdapterError, 424, "broken adapter", None),
        ("unprintable", AdapterError, 424, r"broken \udcff", None),
        ("mistake", EngineError, 500, "internal engine error: KeyError: 'what'", None),
    ],
)
def test_failed_request_raises_error(
    shared: Shared, how: str, kind: type[LoraxError], status: int, message: str, retry_after_s: float | None
) -> None:
    async def test(client: RemoteEngine) -> None:
        good = asyncio.create_task(read(client, make_fake_request(client.new_id(), range(50))))
        with pytest.raises(LoraxError) as caught:
            await read(client, make_fake_request(client.new_id(), how=how))
        assert type(caught.value) is kind
        assert (caught.value.status, caught.value.retry_after_s) == (status, retry_after_s)
        assert str(caught.value).startswith(message)
        assert await good == list(range(50))  # other requests are unaffected

    shared(test)


def test_request_that_cannot_be_encoded_is_input_error(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = Request(client.new_id(), [1], SamplingParams(), StopParams(), salt="\ud800")
        with pytest.raises(InputError, match="surrogates not allowed"):
            await read(client, request)
        with pytest.raises(InputError, match="surrogates not allowed"):
            await client.resolve([AdapterRef("hub", "\ud800")])

    shared(test)


def test_resolve_returns_identity(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        merge = Merge((0.5,), "ties", density=0.25)
        resolved = await client.resolve([AdapterRef("hub", "a", "token")], merge)
        assert resolved == ResolvedAdapter(f"hub:a:token:{merge}", "folder", ("tokenizer.json",))

    shared(test)


def test_resolve_completes_on_idle_engine(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        assert (await client.resolve([AdapterRef("thread", "a")])).identity == "a"

    shared(test)


@pytest.mark.parametrize(
    ("source", "kind", "status", "message", "retry_after_s"),
    [
        ("missing", AdapterNotFoundError, 404, "no a", None),
        ("down", SourceError, 503, "a is down", 2.5),
        ("refused", InputError, 422, "not a", None),
        ("mistake", EngineError, 500, "internal engine error: KeyError: 'a'", None),
        ("exit", EngineError, 500, "internal engine error: SystemExit: a", None),
        ("cancelled", EngineError, 500, "internal engine error: CancelledError: ", None),
        ("odd", EngineError, 500, "internal engine error: ChannelError: cannot encode ResolveReply", None),
    ],
)
def test_resolve_errors_keep_class(
    shared: Shared, source: str, kind: type[LoraxError], status: int, message: str, retry_after_s: float | None
) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(LoraxError) as caught:
            await client.resolve([AdapterRef(source, "a")])
        assert type(caught.value) is kind
        assert (caught.value.status, caught.value.retry_after_s) == (status, retry_after_s)
        assert str(caught.value).startswith(message)

    shared(test)


def test_adapter_can_be_loaded_and_unloaded(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        await client.load("a", pin=True)
        with pytest.raises(AdapterError, match="a is not pinned"):
            await client.load("a")
        await client.unload("a")
        with pytest.raises(AdapterError, match="it is in use"):
            await client.unload("in use")

    shared(test)


def test_adapters_can_be_listed_and_forgotten(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        assert await client.list_adapters(["hash"]) == [AdapterState("hash", "name", "on disk", 7, True, 1, 2)]
        await client.forget("hub", "a")
        with pytest.raises(InputError, match="no b"):
            await client.forget("nowhere", "b")

    shared(test)


def test_client_reports_status_and_info(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        numbers = vars(await client.status())
        assert numbers.pop("idle_s") > 0
        assert list(numbers.values()) == list(range(len(numbers)))
        assert client.info == fake_info(0, await pid_of(client))
        assert client.is_healthy

    shared(test)


def test_sigint_does_not_stop_engine(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        os.kill(await pid_of(client), signal.SIGINT)
        assert await read(client, make_fake_request(client.new_id())) == [1, 2, 3]

    shared(test)


# --- Crashes ----------------------------------------------------------------------------------------------------------


def test_close_is_fast_and_cleans_up(folder: Path) -> None:
    async def test() -> None:
        channel = ClientChannel()
        await channel.start(target := _Target(FakeConfig(str(folder))))
        assert await channel.stop() == 0
        assert await channel.stop() == 0
        wait_for_end(target.config.folder)

    asyncio.run(test())


class _Target:
    def __init__(self, config: FakeConfig) -> None:
        self.config = config

    def __call__(self, address: str) -> None:
        fake_target(self.config, address)


def test_close_fails_running_and_new_requests(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        stream = client.generate(make_fake_request(client.new_id(), how="hang"))
        await anext(stream)
        call = asyncio.create_task(client.resolve([AdapterRef("never", "")]))
        await client.status()
        await client.close()
        with pytest.raises(EngineError, match="the engine is stopped"):
            await anext(stream)
        with pytest.raises(EngineError, match="the engine is stopped"):
            await call
        with pytest.raises(EngineError, match="the engine is stopped") as caught:
            await read(client, make_fake_request(client.new_id()))
        assert caught.value.retry_after_s is None
        assert not client.is_healthy

    run_with(FakeConfig(str(folder)), test)


def test_killed_engine_is_restarted(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        ids = {client.new_id()}
        for number in range(2):
            request = make_fake_request(client.new_id(), how="hang")
            assert request.request_id not in ids
            ids.add(request.request_id)
            stream = client.generate(request)
            await anext(stream)
            calls = [asyncio.create_task(client.resolve([AdapterRef("never", "")])) for _ in range(3)]
            os.kill(await pid_of(client), signal.SIGKILL)
            for waiting in (anext(stream), *calls):
                with pytest.raises(EngineError) as caught:
                    await waiting
                assert str(caught.value) == (
                    "the engine process exited (exit code -9, SIGKILL); the engine is restarting"
                )
                assert caught.value.retry_after_s is not None
                assert caught.value.retry_after_s >= 1
            await until_healthy(client)
            assert client.info.num_blocks == number + 1
            assert await read(client, make_fake_request(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder)), test)


def test_engine_crash_fails_all_streams(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        others = [client.generate(make_fake_request(client.new_id(), how="hang")) for _ in range(20)]
        for other in others:
            await anext(other)
        with pytest.raises(EngineError, match="SIGKILL"):
            await read(client, make_fake_request(client.new_id(), how="die"))
        for other in others:
            with pytest.raises(EngineError, match="SIGKILL"):
                await anext(other)

    run_with(FakeConfig(str(folder)), test)


def test_requests_are_rejected_during_restart(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        stream = client.generate(make_fake_request(client.new_id(), how="hang"))
        await anext(stream)
        os.kill(await pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineError):
            await anext(stream)
        while len(list(folder.iterdir())) < 2:
            await asyncio.sleep(0.005)
        assert not client.is_healthy
        with pytest.raises(EngineError, match=r"SIGKILL.*; the engine is restarting") as caught:
            await read(client, make_fake_request(client.new_id()))
        assert caught.value.retry_after_s is not None
        with pytest.raises(EngineError, match="the engine is restarting"):
            await client.status()

    run_with(FakeConfig(str(folder), starts=("", "hang")), test)  # close also stops a hanging engine


def test_failed_restart_is_retried(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(EngineError):
            await read(client, make_fake_request(client.new_id(), how="die"))
        await until_healthy(client)
        assert client.info.num_blocks == 4
        assert await read(client, make_fake_request(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder), starts=("", "die", "raise", "exit")), test)


def test_restart_can_be_disabled(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await read(client, make_fake_request(client.new_id(), how="die"))
        assert str(caught.value) == "the engine process exited (exit code -9, SIGKILL)"
        assert client._supervisor is not None
        await client._supervisor
        with pytest.raises(EngineError) as caught:
            await read(client, make_fake_request(client.new_id()))
        assert caught.value.retry_after_s is None
        assert len(list(folder.iterdir())) == 1

    run_with(FakeConfig(str(folder)), test, restart=False)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "the engine failed: RuntimeError: boom \\udcff; the engine is restarting"),
        ("report", "the engine failed: rank 1 ended; the engine is restarting"),
        ("report, stuck", "the engine failed: rank 1 ended; the engine is restarting"),
        ("garbage", "invalid message from the engine: cannot decode a message of 1 bytes: "),
    ],
)
def test_engine_failure_reports_reason_and_restarts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    if how == "report, stuck":
        monkeypatch.setattr(channel_module, "STOP_GRACE_S", 0.05)

    async def test(client: RemoteEngine) -> None:
        other = client.generate(make_fake_request(client.new_id(), how="hang"))
        await anext(other)
        for waiting in (read(client, make_fake_request(client.new_id(), how=how)), anext(other)):
            with pytest.raises(EngineError) as caught:
                await waiting
            assert str(caught.value).startswith(reason)
        await until_healthy(client)
        assert await read(client, make_fake_request(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder)), test)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("die early", "(exit code -9, SIGKILL)"),
        ("die", "(exit code -9, SIGKILL)"),
        ("exit", "(exit code 7)"),
        ("raise, bug", "(exit code 1): ZeroDivisionError: division by zero"),
    ],
)
def test_engine_start_failure_reports_reason(folder: Path, how: str, reason: str) -> None:
    async def test() -> None:
        client = RemoteEngine(fake_target, FakeConfig(str(folder), starts=(how,)))
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(EngineError) as caught:
                await client.start()
        assert str(caught.value) == f"the engine process exited during startup {reason}"
        assert not client.is_healthy
        await client.close()

    asyncio.run(test())
    wait_for_end(folder)


def test_user_errors_during_start_are_raised_unchanged(folder: Path) -> None:
    async def test() -> None:
        client = RemoteEngine(fake_target, FakeConfig(str(folder), starts=("raise",)))
        with pytest.raises(ConfigError) as caught:
            await client.start()
        assert str(caught.value) == "no such model"
        await client.close()

    asyncio.run(test())
    wait_for_end(folder)


def test_cancelled_start_cleans_up(folder: Path) -> None:
    async def test() -> None:
        client = RemoteEngine(fake_target, FakeConfig(str(folder), starts=("hang",)))
        starting = asyncio.create_task(client.start())
        while not list(folder.iterdir()):
            await asyncio.sleep(0.005)
        starting.cancel()
        await asyncio.wait((starting,))
        assert starting.cancelled()

    asyncio.run(test())
    wait_for_end(folder)


def test_unpicklable_target_fails_immediately(folder: Path) -> None:
    async def test() -> None:
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            await RemoteEngine(lambda *_: None, None).start()

    asyncio.run(test())


def test_unresponsive_engine_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "STOP_GRACE_S", 0.05)

    async def test(client: RemoteEngine) -> None:
        assert (await anext(client.generate(make_fake_request(client.new_id(), how="stuck")))).tokens[0].token_id == 1

    run_with(FakeConfig(str(folder), ignore_sigterm=True), test)


def test_cancelled_close_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: RemoteEngine) -> None:
        await anext(client.generate(make_fake_request(client.new_id(), how="stuck")))
        closing = asyncio.create_task(client.close())
        assert client._supervisor is not None
        await asyncio.wait((client._supervisor,))
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        monkeypatch.setattr(channel_module, "STOP_GRACE_S", 0.05)

    run_with(FakeConfig(str(folder)), test)


# --- API process exit -------------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from lorax_server.engine.remote.remote_engine import RemoteEngine
from tests.engine.fake_engine import FakeConfig, fake_target, make_fake_request

async def main():
    client = RemoteEngine(fake_target, FakeConfig(sys.argv[1], starts=(sys.argv[2],), orphan_s=0.05))
    if sys.argv[2] == "hang":
        print(flush=True)
    await client.start()
    stream = client.generate(make_fake_request(client.new_id(), how=sys.argv[3]))
    await anext(stream)
    print(flush=True)
    if sys.argv[4] == "raise":
        raise RuntimeError("out")
    await asyncio.sleep(1000)

if __name__ == "__main__":
    asyncio.run(main())
"""


def start_parent(folder: Path, start: str = "", how: str = "hang", end: str = "") -> subprocess.Popen[str]:
    script = folder.parent / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder.parent / "t")}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), start, how, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("start", "how"), [("", "hang"), ("", "stuck"), ("hang", "")], ids=["idle", "stuck in a step", "starting"]
)
def test_engine_exits_with_parent_process(folder: Path, start: str, how: str) -> None:
    with start_parent(folder, start, how) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "\n"
        while not list(folder.iterdir()):
            time.sleep(0.005)
        parent.kill()
    wait_for_end(folder)  # the fixture checks that the socket folder is removed


def test_process_exits_without_close(folder: Path) -> None:
    with start_parent(folder, end="raise") as parent:
        _, errors = parent.communicate(timeout=GUARD_S)
        assert parent.returncode == 1
        assert "RuntimeError: out" in errors
    wait_for_end(folder)


# --- Units ------------------------------------------------------------------------------------------------------------


def test_restart_delay_grows_and_resets() -> None:
    pauses = [0.0]
    for _ in range(9):
        pauses.append(next_restart_delay_s(pauses[-1], uptime_s=0.0, first_delay_s=1.0))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, MAX_RESTART_DELAY_S, MAX_RESTART_DELAY_S, MAX_RESTART_DELAY_S]
    assert next_restart_delay_s(MAX_RESTART_DELAY_S, uptime_s=STABLE_AFTER_S, first_delay_s=1.0) == 0


def test_unknown_error_class_keeps_message() -> None:
    for kind in ("Unknown", "__doc__", "ValueError"):
        error = Failure(kind, 418, "text", 1.0).to_error()
        assert type(error) is LoraxError
        assert (error.status, str(error), error.retry_after_s) == (418, "text", 1.0)


def test_exit_codes_are_described_with_signal_names() -> None:
    assert [describe_exit(code) for code in (0, -11, -1000)] == [
        "exit code 0",
        "exit code -11, SIGSEGV",
        "exit code -1000",
    ]


def test_client_does_not_import_torch_or_numpy() -> None:
    code = "import sys, lorax_server.engine.remote.remote_engine, tests.engine.fake_engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    modules = set(done.stdout.split())
    assert "zmq" in modules
    assert not modules & {"torch", "numpy", "transformers", "safetensors"}
    assert messages.__name__ in modules
