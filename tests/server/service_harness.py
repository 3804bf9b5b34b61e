"""A `Service` with a scripted engine, without sockets or processes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.engine.remote import messages
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import ModelNames
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.sse import EventStream, encode_event
from lorax_server.server.request_context import RequestContext, RequestOptions
from lorax_server.server.service import Service
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.text.generation_defaults import GenerationDefaults
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import (
    EngineInfo,
    Failure,
    FinishReason,
    Output,
    Request,
    ResolvedAdapter,
    SampledToken,
    SamplingParams,
    StartInfo,
    StopParams,
    Structure,
    TokenTable,
)
from tests.text.tokenizers import byte_level

Message = dict[str, Any]
Work = Callable[[RequestContext], Coroutine[Any, Any, Response]]
INFO = EngineInfo(max_length=128, vocab_size=300, num_blocks=1, block_size=16, dtype="float32", device="cpu")


def _fail_to_start(config: None, address: str) -> None:
    raise AssertionError("tests must not start a process")


class ScriptedEngine(RemoteEngine):
    """A `RemoteEngine` without a process: it records sent messages, and tests emit the outputs."""

    def __init__(self) -> None:
        super().__init__(_fail_to_start, None)
        self.is_healthy = True
        self.info = INFO
        self.sent: list[messages.ToEngine] = []
        self.resolutions: dict[str, ResolvedAdapter | LoraxError] = {}  # results of `resolve`, by token or adapter name
        self.is_closed = False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self._fail_all("the engine is stopped", None)
        self.is_closed = True

    def _send(self, message: messages.ToEngine) -> None:
        if not self.is_healthy:
            raise self._make_unavailable_error()
        self.sent.append(message)
        if isinstance(message, messages.Resolve):
            ref = message.refs[0]
            resolution = self.resolutions.get(ref.token or ref.name)
            if resolution is not None:
                asyncio.get_running_loop().call_soon(self._settle, _reply(message.query_id, resolution))

    def emit_tokens(self, request_id: int, *token_ids: int, end: FinishReason | None = None) -> None:
        for i, token_id in enumerate(token_ids):
            is_last = i == len(token_ids) - 1
            token = SampledToken(token_id, -0.5)
            self._deliver(Output(request_id, (token,), end if is_last else None, start_info=StartInfo(0.25, 0.125, 3)))

    def fail(self, request_id: int, error: LoraxError) -> None:
        self._deliver(Output.failed(request_id, error))

    @property
    def added(self) -> list[Request]:
        return [message.request for message in self.sent if isinstance(message, messages.Add)]

    @property
    def aborted(self) -> list[int]:
        return [each for message in self.sent if isinstance(message, messages.Abort) for each in message.request_ids]


def _reply(query_id: int, resolution: ResolvedAdapter | LoraxError) -> messages.Reply[Any]:
    if isinstance(resolution, LoraxError):
        return messages.QueryFailed(query_id, Failure.from_error(resolution))
    return messages.ResolveReply(query_id, resolution)


@cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer(byte_level(300).tokenizer, {"eos_token": "</s>"}, {})


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


async def settle() -> None:
    """Let the event loop run all ready callbacks."""
    for _ in range(20):
        await asyncio.sleep(0)


MAX_RUNNING = 3


class Peer:
    """A client that reads a response. `before_send` may block or raise before a message is accepted."""

    def __init__(self, before_send: Callable[[Message], Awaitable[None]] | None = None) -> None:
        self.sent: list[Message] = []
        self.arrivals: asyncio.Queue[Message] = asyncio.Queue()
        self._before_send = before_send

    async def send(self, message: Any) -> None:
        if self._before_send is not None:
            await self._before_send(message)
        self.sent.append(message)

    async def receive(self) -> Message:
        return await self.arrivals.get()

    def disconnect(self) -> None:
        self.arrivals.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class TrustingTokenizers(Tokenizers):
    """Tokenizers that accept every grammar without a sandbox process."""

    async def check_grammar(
        self, tokenizer: TextTokenizer, structure: Structure, tenant: str
    ) -> tuple[Structure, TokenTable | None]:
        return structure, None if tokenizer.shares_vocabulary(self.base) else tokenizer.token_table()


class ServiceHarness:
    """A service with a scripted engine, and the parts that tests inspect."""

    def __init__(self, **config: Any) -> None:
        self.engine = ScriptedEngine()
        settings = ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base", **{"drain_s": 1000.0} | config)
        keys = KeyRing(settings.api_keys, settings.admin_key, settings.keys_file)
        tokenizers = TrustingTokenizers(tokenizer(), Path("nowhere"))
        self.service = Service(
            settings, self.engine, keys, ModelNames("base"), tokenizers, GenerationDefaults(), Tracer(None)
        )
        self.service.rate_limits = self.rate_limits = RateLimits(MAX_RUNNING)
        self.peer = Peer()

    @property
    def metrics(self) -> Metrics:
        return self.service.metrics

    def submit(self, work: Work, path: str = "/generate", **headers: str) -> "asyncio.Task[Response]":
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": named,
            "state": {"record": RequestRecord("it", path)},
        }
        scope |= {"query_string": b"", "server": ("host", 80), "scheme": "http"}
        http = HttpRequest(scope, self.peer.receive)
        http.state.key = self.service.identify(http.headers)
        return asyncio.create_task(self._run(http, work))

    async def _run(self, http: HttpRequest, work: Work) -> Response:
        return await RequestContext(self.service, http).run(work)

    async def read(self, response: Response) -> None:
        await response({"type": "http"}, self.peer.receive, self.peer.send)

    def assert_all_released(self) -> None:
        assert self.rate_limits.num_running == 0
        assert not self.service.running
        assert not self.engine._streams


# --- Route handlers for tests -----------------------------------------------------------------------------------------


async def prepare(call: RequestContext) -> list[RemoteGeneration]:
    call.record_model(call.service.model_names.base_selection)
    model = await call.resolve(call.service.model_names.base_selection)
    options = RequestOptions(SamplingParams(), StopParams(max_new_tokens=128), [0], may_clamp_max_new_tokens=True)
    return await call.prepare(model, "ask", options)


async def whole(call: RequestContext) -> Response:
    await call.admit(1, False)
    generations = await prepare(call)
    await finish_all(generations)
    return json_response({"text": generations[0].text}, 200, call.response_headers(1))


async def streamed(call: RequestContext) -> Response:
    await call.admit(1, True)
    (generation,) = await prepare(call)

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.stream()) as stream:
            async for token_events in stream:
                yield encode_event("".join(token_event.text for token_event in token_events))

    return EventStream(await call.await_first_event(events()), 1000.0, call.stream_headers())


async def resolve_adapter(call: RequestContext) -> Response:
    await call.admit(1, False)
    call.record_model(selection := call.service.model_names.select_adapter("owner/it", None))
    await call.resolve(selection)
    return json_response(call.record.identity)


def parse_body(response: Response) -> Any:
    return json.loads(bytes(response.body))
