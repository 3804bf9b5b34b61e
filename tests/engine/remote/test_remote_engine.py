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
from lorax_server.engine.remote.channel import ClientChannel, describe
from lorax_server.engine.remote.remote_engine import MAX_PAUSE_S, STEADY_S, RemoteEngine, next_pause_s
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
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
    Resolved,
    SampledToken,
    SamplingParams,
    StopParams,
)
from tests.engine.fake_engine import FakeConfig, ask_for, fake_info, fake_target

ROOT = Path(__file__).parents[3]
GUARD_S = 60
Test = Callable[[RemoteEngine], Awaitable[None]]

logging.getLogger("lorax_server.engine.remote.remote_engine").setLevel(logging.CRITICAL)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder where each engine leaves a file. No socket and no process may be left after the test."""
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
        client = RemoteEngine(fake_target, config, restart=restart, first_pause_s=0.001)
        async with asyncio.timeout(GUARD_S):
            await client.start()
            try:
                await test(client)
            finally:
                await client.close()
        wait_for_end(config.folder)

    asyncio.run(run())


def wait_for_end(folder: str | Path) -> None:
    """Wait until all engines of this folder have ended: each holds a lock on its file. No zombies may be left."""
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
    """Wait until the engine has been told to abort a request."""
    await client.resolve([AdapterRef("aborted", str(request_id))])


# --- One engine for all tests that do not harm it ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Test], None]]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        client = RemoteEngine(fake_target, FakeConfig(folder))
        runner.run(client.start())

        async def guarded(test: Test) -> None:
            async with asyncio.timeout(GUARD_S):
                await test(client)
                assert client._streams == {}
                assert client._queries == {}

        yield lambda test: runner.run(guarded(test))
        runner.run(client.close())
        assert len(list(Path(folder).iterdir())) == 1  # it never died


Shared = Callable[[Test], None]


def test_a_request_streams_its_tokens(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request_id = client.new_id()
        outputs = [output async for output in client.generate(ask_for(request_id, [5, 6]))]
        assert outputs == [
            Output(request_id, (SampledToken(5, -0.5),)),
            Output(request_id, (SampledToken(6, -0.5),), FinishReason.EOS_TOKEN),
        ]

    shared(test)


def test_two_hundred_requests_at_once_each_get_their_own_tokens(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        prompts = [list(range(number, number + 1 + number % 30)) for number in range(200)]
        requests = [ask_for(client.new_id(), prompt) for prompt in prompts]
        assert await asyncio.gather(*(read(client, request) for request in requests)) == prompts

    shared(test)


def test_a_reader_that_does_not_read_holds_up_nobody_and_loses_nothing(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        slow = client.generate(ask_for(client.new_id(), range(100)))
        first = await anext(slow)
        for _ in range(3):
            assert await read(client, ask_for(client.new_id(), range(100))) == list(range(100))
        assert [first.tokens[0].token_id] + [output.tokens[0].token_id async for output in slow] == list(range(100))

    shared(test)


def test_who_stops_reading_aborts_the_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = ask_for(client.new_id(), how="hang")
        stream = client.generate(request)
        assert (await anext(stream)).tokens[0].token_id == 1
        await stream.aclose()
        await aborted(client, request.request_id)

    shared(test)


def test_who_is_cancelled_aborts_the_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = ask_for(client.new_id(), how="hang")
        reading = asyncio.create_task(read(client, request))
        while request.request_id not in client._streams:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        assert reading.cancelled()
        await aborted(client, request.request_id)

    shared(test)


def test_who_forgets_the_stream_aborts_the_request(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = ask_for(client.new_id(), how="hang")
        async for _ in client.generate(request):
            break
        await aborted(client, request.request_id)

    shared(test)


def test_an_aborted_request_ends_for_its_reader_too(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = ask_for(client.new_id(), how="hang")
        tokens = []
        async for output in client.generate(request):
            tokens.append(output.tokens[0].token_id)
            client.abort(request.request_id)
        assert tokens == [1]
        await aborted(client, request.request_id)
        client.abort(request.request_id)  # once more does nothing

    shared(test)


def test_a_request_that_ended_is_not_aborted(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = ask_for(client.new_id())
        await read(client, request)
        looking = asyncio.create_task(aborted(client, request.request_id))
        await client.status()  # comes after whatever was sent before it
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
        ("mistake", EngineError, 500, "the engine made a mistake: KeyError: 'what'", None),
    ],
)
def test_a_request_that_fails_raises_its_error(
    shared: Shared, how: str, kind: type[LoraxError], status: int, message: str, retry_after_s: float | None
) -> None:
    async def test(client: RemoteEngine) -> None:
        good = asyncio.create_task(read(client, ask_for(client.new_id(), range(50))))
        with pytest.raises(LoraxError) as caught:
            await read(client, ask_for(client.new_id(), how=how))
        assert type(caught.value) is kind
        assert (caught.value.status, caught.value.retry_after_s) == (status, retry_after_s)
        assert str(caught.value).startswith(message)
        assert await good == list(range(50))  # and harms no other request

    shared(test)


def test_a_request_that_cannot_be_sent_is_a_mistake_of_who_asked(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        request = Request(client.new_id(), [1], SamplingParams(), StopParams(), salt="\ud800")
        with pytest.raises(InputError, match="surrogates not allowed"):
            await read(client, request)
        with pytest.raises(InputError, match="surrogates not allowed"):
            await client.resolve([AdapterRef("hub", "\ud800")])

    shared(test)


def test_resolve_tells_who_a_name_means(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        merge = Merge((0.5,), "ties", density=0.25)
        resolved = await client.resolve([AdapterRef("hub", "a", "token")], merge)
        assert resolved == Resolved(f"hub:a:token:{merge}", "folder", ("tokenizer.json",))

    shared(test)


def test_what_is_done_in_another_thread_is_answered_without_anything_else_happening(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        assert (await client.resolve([AdapterRef("thread", "a")])).identity == "a"

    shared(test)


@pytest.mark.parametrize(
    ("source", "kind", "status", "message", "retry_after_s"),
    [
        ("missing", AdapterNotFoundError, 404, "no a", None),
        ("down", SourceError, 503, "a is down", 2.5),
        ("refused", InputError, 422, "not a", None),
        ("mistake", EngineError, 500, "the engine made a mistake: KeyError: 'a'", None),
        ("exit", EngineError, 500, "the engine made a mistake: SystemExit: a", None),
        ("cancelled", EngineError, 500, "the engine made a mistake: CancelledError: ", None),
        ("odd", EngineError, 500, "the engine made a mistake: ChannelError: a message ResolveReply cannot be", None),
    ],
)
def test_errors_of_resolve_keep_their_class(
    shared: Shared, source: str, kind: type[LoraxError], status: int, message: str, retry_after_s: float | None
) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(LoraxError) as caught:
            await client.resolve([AdapterRef(source, "a")])
        assert type(caught.value) is kind
        assert (caught.value.status, caught.value.retry_after_s) == (status, retry_after_s)
        assert str(caught.value).startswith(message)

    shared(test)


def test_adapters_are_loaded_and_unloaded(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        await client.load("a", pin=True)
        with pytest.raises(AdapterError, match="a is not pinned"):
            await client.load("a")
        await client.unload("a")
        with pytest.raises(AdapterError, match="it is in use"):
            await client.unload("in use")

    shared(test)


def test_adapters_are_listed_and_forgotten(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        assert await client.list_adapters(["hash"]) == [AdapterState("hash", "name", "on disk", 7, True, 1, 2)]
        await client.forget("hub", "a")
        with pytest.raises(InputError, match="no b"):
            await client.forget("nowhere", "b")

    shared(test)


def test_the_status_and_what_the_engine_says_of_itself(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        numbers = vars(await client.status())
        assert numbers.pop("idle_s") > 0
        assert list(numbers.values()) == list(range(len(numbers)))
        assert client.info == fake_info(0, await pid_of(client))
        assert client.is_healthy

    shared(test)


def test_ctrl_c_in_the_terminal_does_not_stop_the_engine_by_itself(shared: Shared) -> None:
    async def test(client: RemoteEngine) -> None:
        os.kill(await pid_of(client), signal.SIGINT)
        assert await read(client, ask_for(client.new_id())) == [1, 2, 3]

    shared(test)


# --- Engines that die -------------------------------------------------------------------------------------------------


def test_stop_leaves_nothing_and_is_heard_at_once(folder: Path) -> None:
    async def test() -> None:
        channel = ClientChannel()
        await channel.start(target := _Target(FakeConfig(str(folder))))
        assert await channel.end() == 0
        assert await channel.end() == 0
        wait_for_end(target.config.folder)

    asyncio.run(test())


class _Target:
    def __init__(self, config: FakeConfig) -> None:
        self.config = config

    def __call__(self, address: str) -> None:
        fake_target(self.config, address)


def test_closing_ends_what_is_running_and_refuses_what_comes(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        stream = client.generate(ask_for(client.new_id(), how="hang"))
        await anext(stream)
        call = asyncio.create_task(client.resolve([AdapterRef("never", "")]))
        await client.status()
        await client.close()
        with pytest.raises(EngineError, match="the engine is stopped"):
            await anext(stream)
        with pytest.raises(EngineError, match="the engine is stopped"):
            await call
        with pytest.raises(EngineError, match="the engine is stopped") as caught:
            await read(client, ask_for(client.new_id()))
        assert caught.value.retry_after_s is None
        assert not client.is_healthy

    run_with(FakeConfig(str(folder)), test)


def test_an_engine_killed_in_mid_stream_is_started_again_and_again(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        ids = {client.new_id()}
        for number in range(2):
            request = ask_for(client.new_id(), how="hang")
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
                    "the engine process ended (exit code -9, SIGKILL); it is being started again"
                )
                assert caught.value.retry_after_s is not None
                assert caught.value.retry_after_s >= 1
            await until_healthy(client)
            assert client.info.num_blocks == number + 1
            assert await read(client, ask_for(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder)), test)


def test_an_engine_that_kills_itself_ends_every_stream(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        others = [client.generate(ask_for(client.new_id(), how="hang")) for _ in range(20)]
        for other in others:
            await anext(other)
        with pytest.raises(EngineError, match="SIGKILL"):
            await read(client, ask_for(client.new_id(), how="die"))
        for other in others:
            with pytest.raises(EngineError, match="SIGKILL"):
                await anext(other)

    run_with(FakeConfig(str(folder)), test)


def test_new_requests_are_refused_while_the_engine_starts_again(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        stream = client.generate(ask_for(client.new_id(), how="hang"))
        await anext(stream)
        os.kill(await pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineError):
            await anext(stream)
        while len(list(folder.iterdir())) < 2:
            await asyncio.sleep(0.005)
        assert not client.is_healthy
        with pytest.raises(EngineError, match=r"SIGKILL.*; it is being started again") as caught:
            await read(client, ask_for(client.new_id()))
        assert caught.value.retry_after_s is not None
        with pytest.raises(EngineError, match="it is being started again"):
            await client.status()

    run_with(FakeConfig(str(folder), starts=("", "hang")), test)  # closing the client ends also an engine that hangs


def test_an_engine_that_dies_while_it_starts_again_is_started_until_it_does_not(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(EngineError):
            await read(client, ask_for(client.new_id(), how="die"))
        await until_healthy(client)
        assert client.info.num_blocks == 4
        assert await read(client, ask_for(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder), starts=("", "die", "raise", "exit")), test)


def test_an_engine_that_is_not_to_be_started_again_is_not(folder: Path) -> None:
    async def test(client: RemoteEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await read(client, ask_for(client.new_id(), how="die"))
        assert str(caught.value) == "the engine process ended (exit code -9, SIGKILL)"
        assert client._supervisor is not None
        await client._supervisor
        with pytest.raises(EngineError) as caught:
            await read(client, ask_for(client.new_id()))
        assert caught.value.retry_after_s is None
        assert len(list(folder.iterdir())) == 1

    run_with(FakeConfig(str(folder)), test, restart=False)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "the engine failed: RuntimeError: boom \\udcff; it is being started again"),
        ("report", "the engine failed: rank 1 ended; it is being started again"),
        ("report, stuck", "the engine failed: rank 1 ended; it is being started again"),
        ("garbage", "the engine is not understood: a message of 1 bytes cannot be read: "),
    ],
)
def test_an_engine_that_fails_says_why_and_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    if how == "report, stuck":
        monkeypatch.setattr(channel_module, "GRACE_S", 0.05)

    async def test(client: RemoteEngine) -> None:
        other = client.generate(ask_for(client.new_id(), how="hang"))
        await anext(other)
        for waiting in (read(client, ask_for(client.new_id(), how=how)), anext(other)):
            with pytest.raises(EngineError) as caught:
                await waiting
            assert str(caught.value).startswith(reason)
        await until_healthy(client)
        assert await read(client, ask_for(client.new_id())) == [1, 2, 3]

    run_with(FakeConfig(str(folder)), test)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("die early", "(exit code -9, SIGKILL)"),
        ("die", "(exit code -9, SIGKILL)"),
        ("exit", "(exit code 7)"),
        ("raise", "(exit code 1): no such model"),
    ],
)
def test_an_engine_that_cannot_start_says_why(folder: Path, how: str, reason: str) -> None:
    async def test() -> None:
        client = RemoteEngine(fake_target, FakeConfig(str(folder), starts=(how,)))
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(EngineError) as caught:
                await client.start()
        assert str(caught.value) == f"the engine process ended while it was starting {reason}"
        assert not client.is_healthy
        await client.close()

    asyncio.run(test())
    wait_for_end(folder)


def test_who_stops_waiting_for_the_start_leaves_nothing(folder: Path) -> None:
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


def test_what_cannot_be_given_to_a_process_is_an_error_at_once(folder: Path) -> None:
    async def test() -> None:
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            await RemoteEngine(lambda *_: None, None).start()

    asyncio.run(test())


def test_an_engine_that_does_not_listen_is_ended_by_force(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GRACE_S", 0.05)

    async def test(client: RemoteEngine) -> None:
        assert (await anext(client.generate(ask_for(client.new_id(), how="stuck")))).tokens[0].token_id == 1

    run_with(FakeConfig(str(folder), ignore_sigterm=True), test)


def test_closing_can_be_cancelled_and_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: RemoteEngine) -> None:
        await anext(client.generate(ask_for(client.new_id(), how="stuck")))
        closing = asyncio.create_task(client.close())
        assert client._supervisor is not None
        await asyncio.wait((client._supervisor,))
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        monkeypatch.setattr(channel_module, "GRACE_S", 0.05)

    run_with(FakeConfig(str(folder)), test)


# --- When the API process dies ----------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from lorax_server.engine.remote.remote_engine import RemoteEngine
from tests.engine.fake_engine import FakeConfig, ask_for, fake_target

async def main():
    client = RemoteEngine(fake_target, FakeConfig(sys.argv[1], starts=(sys.argv[2],), orphan_s=0.05))
    if sys.argv[2] == "hang":
        print(flush=True)
    await client.start()
    stream = client.generate(ask_for(client.new_id(), how=sys.argv[3]))
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
def test_an_engine_ends_when_the_process_that_it_serves_is_killed(folder: Path, start: str, how: str) -> None:
    with start_parent(folder, start, how) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "\n"
        while not list(folder.iterdir()):
            time.sleep(0.005)
        parent.kill()
    wait_for_end(folder)  # and its folder of sockets is removed, which the fixture looks at


def test_a_process_that_forgets_to_close_its_client_ends_nevertheless(folder: Path) -> None:
    with start_parent(folder, end="raise") as parent:
        _, errors = parent.communicate(timeout=GUARD_S)
        assert parent.returncode == 1
        assert "RuntimeError: out" in errors
    wait_for_end(folder)


# --- By itself --------------------------------------------------------------------------------------------------------


def test_pauses_grow_while_an_engine_keeps_dying_and_are_forgotten_when_it_lived() -> None:
    pauses = [0.0]
    for _ in range(9):
        pauses.append(next_pause_s(pauses[-1], lived_s=0.0, first_s=1.0))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    assert next_pause_s(MAX_PAUSE_S, lived_s=STEADY_S, first_s=1.0) == 0


def test_an_error_of_an_unknown_kind_keeps_what_it_says() -> None:
    for kind in ("Unknown", "__doc__", "ValueError"):
        error = Failure(kind, 418, "text", 1.0).to_error()
        assert type(error) is LoraxError
        assert (error.status, str(error), error.retry_after_s) == (418, "text", 1.0)


def test_exit_codes_are_described() -> None:
    assert [describe(code) for code in (0, -11, -1000)] == ["exit code 0", "exit code -11, SIGSEGV", "exit code -1000"]


def test_the_client_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, lorax_server.engine.remote.remote_engine, tests.engine.fake_engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    modules = set(done.stdout.split())
    assert "zmq" in modules
    assert not modules & {"torch", "numpy", "transformers", "safetensors"}
    assert messages.__name__ in modules
