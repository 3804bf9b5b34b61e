"""The engine process loop, run in a thread."""

import logging
import queue
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lorax_server.engine.remote import messages, process
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.engine.remote.process import serve
from lorax_server.errors import EngineError, InputError
from lorax_server.types import AdapterRef, EngineStatus, Output, ResolvedAdapter, SampledToken
from tests.engine.fake_engine import FakeEngine, fake_info, make_fake_request


def make_output(request_id: int, token_id: int, logprob: Any) -> Output:
    return Output(request_id, (SampledToken(token_id, logprob),))


def ids_of(output: Output) -> list[int]:
    return [token.token_id for token in output.tokens]


class Peer:
    """The API side of the channel, which can also send garbage. `process.serve` runs in a thread."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.bind(f"ipc://{folder}/from_engine")
        self._from_engine.rcvtimeo = 60_000
        self._channel = EngineChannel(folder)
        self._channel.open()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.connect(f"ipc://{folder}/to_engine")
        self.engine = FakeEngine(self._channel)
        self.ended_with: queue.Queue[BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        self._thread.start()
        assert self.receive() == messages.Ready(fake_info(7))

    def until_arrived(self, num_messages: int) -> None:
        while self._channel._inbox.qsize() < num_messages:
            self._channel.wake.wait()
            self._channel.wake.clear()

    def _serve(self) -> None:
        try:
            serve(self.engine, self._channel, fake_info(7))
        except BaseException as error:
            self.ended_with.put(error)
        else:
            self.ended_with.put(None)
        self._channel.close()

    def until_closed(self) -> None:
        self._thread.join(60)

    def send(self, message: messages.ToEngine) -> None:
        self.send_bytes(messages.encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._to_engine.send(data)

    def receive(self) -> messages.FromEngine:
        return messages.decode_from_engine(self._from_engine.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def waiting_peer() -> Iterator[Peer]:
    """A peer whose engine is not started and steps only if it is woken."""
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(folder)
        yield peer
        peer.close()


@pytest.fixture
def peer(waiting_peer: Peer) -> Peer:
    waiting_peer.start()
    return waiting_peer


def stop(peer: Peer) -> None:
    peer.send(messages.Stop())
    assert peer.ended_with.get(timeout=60) is None
    assert peer.engine.is_closed


def test_outputs_and_rejections_share_one_message_per_step(waiting_peer: Peer) -> None:
    peer = waiting_peer
    for request_id, how in ((1, ""), (2, "refused"), (3, "")):
        peer.send(messages.Add(make_fake_request(request_id, (7, 8), how)))
    peer.until_arrived(3)
    peer.start()
    tokens = []
    for message in (peer.receive(), peer.receive()):
        assert isinstance(message, messages.Outputs)
        tokens.append([(output.request_id, ids_of(output)) for output in message.outputs])
    assert tokens == [[(2, []), (1, [7]), (3, [7])], [(1, [8]), (3, [8])]]
    stop(peer)


def test_idle_engine_trims_memory_once(waiting_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, given_back = waiting_peer, queue.Queue[None]()
    peer.engine.idle_s = 0.001
    monkeypatch.setattr(process, "trim_malloc", lambda: given_back.put(None))
    peer.start()
    given_back.get(timeout=60)
    peer.send(messages.Add(make_fake_request(1, (7,))))
    assert isinstance(peer.receive(), messages.Outputs)
    given_back.get(timeout=60)
    stop(peer)
    assert given_back.empty()


def test_unreadable_query_gets_error_reply(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        peer.send_bytes(msgspec.msgpack.encode({"type": "Unknown", "query_id": 5}))
        reply = peer.receive()
    assert isinstance(reply, messages.QueryFailed)
    assert (reply.query_id, reply.result.kind) == (5, "EngineError")
    assert "'Unknown'" in reply.result.message
    stop(peer)


def test_unreadable_request_gets_error_output(peer: Peer) -> None:
    whole = msgspec.msgpack.decode(messages.encode(messages.Add(make_fake_request(4))))
    whole["request"]["stop"]["max_new_tokens"] = "many"
    peer.send_bytes(msgspec.msgpack.encode(whole))
    message = peer.receive()
    assert isinstance(message, messages.Outputs)
    ((request_id, failure),) = [(output.request_id, output.failure) for output in message.outputs]
    assert request_id == 4
    assert failure is not None
    assert "max_new_tokens" in failure.message
    stop(peer)


def test_undecodable_message_stops_engine_with_reason(peer: Peer) -> None:
    peer.send_bytes(b"\xc1")
    message = peer.receive()
    assert isinstance(message, messages.EngineFailed)
    assert "cannot decode a message of 1 bytes" in message.message
    peer.send(messages.Stop())  # acknowledged
    assert isinstance(peer.ended_with.get(timeout=60), SystemExit)
    assert peer.engine.is_closed


def test_failing_engine_waits_for_acknowledgment(peer: Peer) -> None:
    peer.send(messages.Add(make_fake_request(1, how="raise")))
    received = [peer.receive(), peer.receive()]
    assert received[1] == messages.EngineFailed("RuntimeError: boom \\udcff")
    assert peer.ended_with.empty()
    assert not peer.engine.is_closed
    peer.send(messages.GetStatus(3))
    peer.send(messages.Stop())
    assert isinstance(peer.ended_with.get(timeout=60), RuntimeError)
    assert peer._channel._is_acknowledged


def test_error_reported_by_another_thread_stops_engine(peer: Peer) -> None:
    error = EngineError("rank 1 ended")
    peer._channel.report(error)
    peer._channel.report(EngineError("and rank 2"))
    assert peer.receive() == messages.EngineFailed("rank 1 ended")
    peer.send(messages.Stop())
    ended_with = peer.ended_with.get(timeout=60)
    assert isinstance(ended_with, SystemExit)
    assert ended_with.code == 1
    assert peer.engine.is_closed


def test_receive_error_stops_engine_with_reason(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot read messages must stop, because no client could stop it."""
    monkeypatch.setattr(messages, "decode_to_engine", lambda _: 1 / 0)
    peer.send(messages.GetStatus(1))
    assert peer.receive() == messages.EngineFailed("ZeroDivisionError: division by zero")
    ended_with = peer.ended_with.get(timeout=60)
    assert isinstance(ended_with, SystemExit)
    assert ended_with.code == 1
    assert peer.engine.is_closed


def test_idle_engine_steps_periodically(waiting_peer: Peer) -> None:
    peer = waiting_peer
    peer.engine.idle_s = 0.001
    steps = iter([[], [], [make_output(1, 5, 0.0)]])
    peer.engine.step = lambda: next(steps, [])  # type: ignore[method-assign]
    peer.start()
    assert peer.receive() == messages.Outputs([make_output(1, 5, 0.0)])
    stop(peer)


class WatchedEvent(threading.Event):
    """An event that records if a thread is waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_reply_from_another_thread_is_sent_immediately(waiting_peer: Peer) -> None:
    peer = waiting_peer
    peer.engine.wake = WatchedEvent()
    peer.engine.resolve = lambda *_: future  # type: ignore[method-assign]
    future: Future[ResolvedAdapter] = Future()
    peer.send(messages.Resolve(1, ()))
    peer.until_arrived(1)
    peer.start()
    assert peer.engine.wake.is_waited_for.wait(60)
    future.set_result(ResolvedAdapter("found"))
    assert peer.receive() == messages.ResolveReply(1, ResolvedAdapter("found"))
    stop(peer)


def block_in_step(peer: Peer) -> threading.Event:
    """Block the engine inside a step until the returned event is set."""
    is_stepping, may_go_on, real_step = threading.Event(), threading.Event(), peer.engine.step

    def step() -> list[Output]:
        is_stepping.set()
        assert may_go_on.wait(60)
        return real_step()

    peer.engine.step = step  # type: ignore[method-assign]
    peer.engine.wake.set()
    assert is_stepping.wait(60)
    return may_go_on


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (messages.Resolve(1, (AdapterRef("local", "poet"),)), messages.ResolveReply),
        (messages.Resolve(1, (AdapterRef("thread", "poet"),)), messages.ResolveReply),
        (messages.Resolve(1, (AdapterRef("missing", "poet"),)), messages.QueryFailed),
        (messages.Resolve(1, (AdapterRef("refused", "poet"),)), messages.QueryFailed),
        (messages.Resolve(1, (AdapterRef("odd", "poet"),)), messages.QueryFailed),
        (messages.ForgetAdapter(1, "local", "poet"), messages.DoneReply),
        (messages.ForgetAdapter(1, "nowhere", "poet"), messages.QueryFailed),
    ],
    ids=["known", "found", "missing", "refused", "cannot be sent", "forgotten", "not forgotten"],
)
def test_resolve_is_handled_during_step(
    peer: Peer, message: messages.ToEngine, kind: type[messages.Reply[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on = block_in_step(peer)
    with caplog.at_level(logging.CRITICAL):
        peer.send(message)
        reply = peer.receive()
    assert type(reply) is kind
    assert isinstance(reply, messages.Reply)
    assert reply.query_id == 1
    may_go_on.set()
    stop(peer)


def test_status_query_waits_for_step(peer: Peer) -> None:
    may_go_on = block_in_step(peer)
    peer.send(messages.GetStatus(1))
    peer.send(messages.Resolve(2, (AdapterRef("local", "poet"),)))
    assert isinstance(peer.receive(), messages.ResolveReply)
    may_go_on.set()
    assert isinstance(peer.receive(), messages.StatusReply)
    stop(peer)


def test_late_reply_after_stop_is_ignored(waiting_peer: Peer) -> None:
    peer = waiting_peer
    future: Future[ResolvedAdapter] = Future()
    peer.engine.resolve = lambda *_: future  # type: ignore[method-assign]
    peer.send(messages.Resolve(1, ()))
    peer.until_arrived(1)
    peer.start()
    stop(peer)
    peer.until_closed()
    future.set_result(ResolvedAdapter("too late"))


def test_message_during_step_wakes_engine(waiting_peer: Peer) -> None:
    peer = waiting_peer

    def step() -> list[Output]:
        peer.engine.wake.set()  # as another thread may do after the check in the step
        return next(steps, [])

    steps = iter([[], [make_output(1, 5, 0.0)]])
    peer.engine.step = step  # type: ignore[method-assign]
    peer.start()
    assert peer.receive() == messages.Outputs([make_output(1, 5, 0.0)])
    stop(peer)


def test_idle_engine_does_not_spin(peer: Peer) -> None:
    steps: list[int] = []

    def step() -> list[Output]:
        steps.append(1)
        return []

    peer.send(messages.GetStatus(1))
    peer.receive()
    peer.engine.step = step  # type: ignore[method-assign]
    for query_id in range(2, 12):
        peer.send(messages.GetStatus(query_id))
        peer.receive()
    assert len(steps) <= 3 * 10  # the message, its wake and its reply may each cause a step
    stop(peer)


def test_engine_does_not_remove_socket_folder(peer: Peer) -> None:
    folder = Path(peer._channel._address)
    stop(peer)
    assert folder.exists()


def test_error_that_cannot_be_encoded_is_replaced(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    """Adapter files may contain lone surrogates, which errors then quote."""

    def status() -> EngineStatus:
        raise InputError("config field \ud800 is not known")

    peer.engine.status = status  # type: ignore[method-assign]
    with caplog.at_level(logging.CRITICAL):  # its log record cannot be sent between test processes either
        peer.send(messages.GetStatus(1))
        reply = peer.receive()
    assert isinstance(reply, messages.QueryFailed)
    assert (reply.query_id, reply.result.status) == (1, 422)
    stop(peer)
