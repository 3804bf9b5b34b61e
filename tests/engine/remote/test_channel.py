"""Messages between processes arrive unchanged."""

import asyncio
import dataclasses
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import ClientChannel, EngineChannel
from lorax_server.errors import EngineError, InputError
from lorax_server.types import (
    MAX_MERGE_WEIGHT,
    MAX_SEED,
    AdapterRef,
    AdapterState,
    Alternatives,
    EngineInfo,
    EngineStatus,
    Failure,
    FinishReason,
    Merge,
    Output,
    Pooled,
    Request,
    ResolvedAdapter,
    SampledToken,
    SamplingParams,
    StartInfo,
    StopParams,
)

ids = st.integers(0, 2**64 - 1)
token_ids = st.integers(0, 2**32)
floats = st.floats()  # NaN and infinity too
texts = st.text()  # without lone surrogates
shares = st.floats(0, 1, exclude_min=True)
sampling = st.builds(
    SamplingParams,
    do_sample=st.booleans(),
    temperature=st.floats(0, 1e30) | st.integers(0, 100),
    top_k=token_ids,
    top_p=shares,
    min_p=shares,
    typical_p=shares,
    repetition_penalty=st.floats(1e-3, 1e3),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-1e6, 1e6), max_size=5),
    watermark=st.booleans(),
    seed=st.integers(0, MAX_SEED) | st.just(MAX_SEED),
    num_alternatives=token_ids,
    raw_logprobs=st.booleans(),
)
stop = st.builds(
    StopParams,
    max_new_tokens=st.integers(100, 2**40),
    min_new_tokens=st.integers(0, 100),
    eos_token_ids=st.frozensets(token_ids, max_size=5),
    ignore_eos=st.booleans(),
    stop_token_ids=st.frozensets(token_ids, max_size=5),
    stop_strings=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    include_stop=st.booleans(),
)
requests = st.builds(
    Request,
    request_id=ids,
    prompt_ids=st.lists(token_ids, max_size=20),
    sampling=sampling,
    stop=stop,
    adapter_identity=texts,
    tenant=texts,
    salt=texts,
    prompt_logprobs=st.booleans(),
    second_start=token_ids,
    speculation=st.booleans(),
)
failures = st.builds(Failure, texts, st.integers(400, 599), texts, st.none() | floats)
alternatives = st.builds(Alternatives, st.lists(token_ids, max_size=3), st.lists(floats, max_size=3))
outputs = st.builds(
    Output,
    ids,
    st.lists(st.builds(SampledToken, token_ids, floats, st.none() | alternatives), max_size=3).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | failures,
    st.none() | st.builds(StartInfo, floats, floats, ids),
    st.none() | st.lists(floats, max_size=3),
    st.none() | st.lists(alternatives, max_size=3),
    st.none() | st.builds(Pooled, st.binary(max_size=8), st.lists(token_ids, max_size=3).map(tuple)),
    token_ids,
    token_ids,
)
refs = st.lists(st.builds(AdapterRef, texts, texts, st.none() | texts), max_size=3).map(tuple)
merges = st.builds(
    Merge,
    st.lists(st.floats(-MAX_MERGE_WEIGHT, MAX_MERGE_WEIGHT), min_size=1, max_size=3).map(tuple),
    st.sampled_from(["linear", "ties", "dare_linear", "dare_ties"]),
    shares,
    st.sampled_from(["total", "frequency"]),
    ids,
)
stamps = st.lists(st.lists(ids, max_size=4).map(tuple), max_size=3).map(tuple)
resolved = st.builds(
    ResolvedAdapter,
    texts,
    st.none() | texts,
    st.lists(texts, max_size=3).map(tuple),
    texts,
    tokenizer_stamps=stamps,
    stale=st.none() | failures,
)
states = st.builds(AdapterState, texts, texts, texts, ids, st.booleans(), ids, ids, st.none() | texts)
NUMBERS = {int: st.integers(0, 2**63), float: floats, "int": st.integers(0, 2**63), "float": floats}
statuses = st.builds(EngineStatus, **{field.name: NUMBERS[field.type] for field in dataclasses.fields(EngineStatus)})

TO_ENGINE = {
    messages.Add: st.builds(messages.Add, requests),
    messages.Abort: st.builds(messages.Abort, st.lists(ids, max_size=5).map(tuple)),
    messages.Resolve: st.builds(messages.Resolve, ids, refs, st.none() | merges),
    messages.LoadAdapter: st.builds(messages.LoadAdapter, ids, texts, st.none() | st.booleans()),
    messages.ForgetAdapter: st.builds(messages.ForgetAdapter, ids, texts, texts),
    messages.ListAdapters: st.builds(messages.ListAdapters, ids, st.lists(texts, max_size=3).map(tuple)),
    messages.UnloadAdapter: st.builds(messages.UnloadAdapter, ids, texts),
    messages.MoveRequests: st.builds(messages.MoveRequests, ids, st.lists(ids, max_size=3).map(tuple), texts),
    messages.GetStatus: st.builds(messages.GetStatus, ids),
    messages.Stop: st.builds(messages.Stop),
}
FROM_ENGINE = {
    messages.Ready: st.builds(messages.Ready, st.builds(EngineInfo, ids, ids, ids, ids, texts, texts)),
    messages.Outputs: st.builds(messages.Outputs, st.lists(outputs, max_size=5)),
    messages.ResolveReply: st.builds(messages.ResolveReply, ids, resolved),
    messages.StatusReply: st.builds(messages.StatusReply, ids, statuses),
    messages.AdaptersReply: st.builds(messages.AdaptersReply, ids, st.lists(states, max_size=3)),
    messages.DoneReply: st.builds(messages.DoneReply, ids),
    messages.QueryFailed: st.builds(messages.QueryFailed, ids, failures),
    messages.EngineFailed: st.builds(messages.EngineFailed, texts),
}


def test_round_trip_tests_cover_all_message_types() -> None:
    assert set(TO_ENGINE) == set(messages.ToEngine.__args__)
    assert set(FROM_ENGINE) == set(messages.FromEngine.__args__)


def comparable(value: object) -> object:
    """Return a value that is equal if types and contents are, with NaN equal to itself."""
    kind = type(value).__name__
    if isinstance(value, msgspec.Struct):
        return kind, {name: comparable(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value):
        return kind, {field.name: comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return kind, {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return kind, [comparable(each) for each in value]
    if isinstance(value, float):
        # A float that was given as an int is a float from then on.
        return "int or float", "NaN" if math.isnan(value) else value
    return "int or float" if kind == "int" else kind, value


def assert_survives(message: messages.EngineMessage, decode: Callable[[bytes], messages.EngineMessage]) -> None:
    assert comparable(decode(messages.encode(message))) == comparable(message)


@given(st.one_of(*TO_ENGINE.values()))
@settings(max_examples=100, deadline=None)
def test_messages_to_engine_round_trip(message: messages.ToEngine) -> None:
    assert_survives(message, messages.decode_to_engine)


@given(st.one_of(*FROM_ENGINE.values()))
@settings(max_examples=100, deadline=None)
def test_messages_from_engine_round_trip(message: messages.FromEngine) -> None:
    assert_survives(message, messages.decode_from_engine)


@given(st.binary(max_size=50), st.one_of(*TO_ENGINE.values()), st.data())
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_decode_or_raise_channel_error(
    noise: bytes, message: messages.ToEngine, data: st.DataObject
) -> None:
    whole = messages.encode(message)
    place = data.draw(st.integers(0, len(whole)))
    for damaged in (noise, whole[:place], whole[:place] + noise + whole[place + len(noise) :]):
        for decode in (messages.decode_to_engine, messages.decode_from_engine):
            try:
                assert isinstance(decode(damaged), messages.EngineMessage)
            except messages.ChannelError as error:
                answer = messages.reply_to_unreadable(damaged, error)
                assert answer is None or isinstance(answer, messages.EngineMessage)


def request_with(**fields: Any) -> Request:
    return Request(**{"request_id": 1, "prompt_ids": [1], "sampling": SamplingParams(), "stop": StopParams(), **fields})


def test_million_token_prompt_round_trips() -> None:
    prompt_ids = list(range(100_000, 1_100_000))
    message = messages.decode_to_engine(messages.encode(messages.Add(request_with(prompt_ids=prompt_ids))))
    assert isinstance(message, messages.Add)
    assert message.request.prompt_ids == prompt_ids


def test_any_sequence_or_mapping_can_be_encoded() -> None:
    sampling = SamplingParams(logit_bias=MappingProxyType({5: 1.0}))
    message = messages.decode_to_engine(
        messages.encode(messages.Add(request_with(prompt_ids=range(3), sampling=sampling)))
    )
    assert message == messages.Add(request_with(prompt_ids=[0, 1, 2], sampling=SamplingParams(logit_bias={5: 1.0})))


@pytest.mark.parametrize(
    "fields",
    [{"salt": "\ud800"}, {"request_id": 2**64}, {"adapter_identity": object()}],
    ids=["surrogate", "large", "object"],
)
def test_unsupported_values_raise_channel_error(fields: dict[str, Any]) -> None:
    with pytest.raises(messages.ChannelError, match="cannot encode Add: "):
        messages.encode(messages.Add(request_with(**fields)))


def test_message_in_wrong_direction_is_rejected() -> None:
    with pytest.raises(messages.ChannelError, match="Done"):
        messages.decode_to_engine(messages.encode(messages.DoneReply(1)))


def test_decoding_validates_parameters() -> None:
    whole = msgspec.msgpack.decode(messages.encode(messages.Add(request_with())))
    whole["request"]["sampling"]["temperature"] = -1.0
    with pytest.raises(messages.ChannelError, match="`temperature` must be non-negative") as caught:
        messages.decode_to_engine(msgspec.msgpack.encode(whole))
    assert isinstance(caught.value.__cause__, InputError)


def test_unreadable_message_gets_reply_if_sender_is_known() -> None:
    error = messages.ChannelError("unreadable")
    failure = Failure.from_error(EngineError("unreadable"))
    call = msgspec.msgpack.encode({"type": "Unknown", "query_id": 5})
    assert messages.reply_to_unreadable(call, error) == messages.QueryFailed(5, failure)
    answer = messages.reply_to_unreadable(messages.encode(messages.Add(request_with(request_id=6, salt=True))), error)
    assert isinstance(answer, messages.Outputs)
    assert [(output.request_id, output.failure) for output in answer.outputs] == [(6, failure)]
    assert messages.reply_to_unreadable(b"\xc1", error) is None


def test_socket_folder_is_private_and_removed() -> None:
    async def look() -> None:
        channel = ClientChannel()
        folder = Path(channel.open())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        assert [path.name for path in folder.iterdir()] == ["from_engine"]
        channel.close()
        assert not folder.exists()

    asyncio.run(look())


def test_too_long_socket_path_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    async def open_it() -> None:
        channel = ClientChannel()
        try:
            channel.open()
        finally:
            channel.close()

    with pytest.raises(messages.ChannelError, match=r"cannot listen at .*TMPDIR"):
        asyncio.run(open_it())
    assert list(folder.iterdir()) == []


def test_messages_keep_order_in_both_directions() -> None:
    async def talk() -> None:
        client = ClientChannel()
        engine = EngineChannel(client.open())
        engine.open()
        for number in range(5000):
            client.send(messages.GetStatus(number))
            engine.send(messages.DoneReply(number))
        assert [await client.receive() for _ in range(5000)] == [messages.DoneReply(number) for number in range(5000)]
        taken: list[messages.ToEngine] = []
        while len(taken) < 5000:
            engine.wake.wait()
            engine.wake.clear()
            taken += engine.receive_all()
        assert taken == [messages.GetStatus(number) for number in range(5000)]
        engine.close()
        client.close()

    asyncio.run(talk())
