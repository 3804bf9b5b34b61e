"""The engine as the server sees it: a protocol, so that the server depends on no process and no socket."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from lorax_server.engine.remote.output_stream import Handler
from lorax_server.errors import LoraxError
from lorax_server.types import AdapterRef, AdapterState, EngineInfo, EngineStatus, Merge, Output, Request, Resolved


class EngineClient(Protocol):
    """An engine for one event loop: `RemoteEngine`, or a stand-in of a test."""

    @property
    def is_healthy(self) -> bool: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def info(self) -> EngineInfo:
        """Facts about the engine, known once it has started."""

    def new_id(self) -> int:
        """Return an id for a request, never the same one twice."""

    async def start(self) -> None:
        """Wait until the engine takes requests."""

    async def close(self) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield outputs one by one, like `stream`."""

    def stream(self, request: Request, handler: Handler | None = None) -> AsyncGenerator[list[Output], None]:
        """Yield lists of outputs as they arrive, or raise the error that ends the request. Closing aborts the request.

        While the reader waits, outputs other than the last are offered to `handler` first, so that no task has to wake.
        """

    def abort(self, request_id: int, error: LoraxError | None = None) -> None:
        """End a request and its reader, which gets the error if there is one. Do nothing if it has ended already."""

    async def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Resolved: ...
    async def load(self, identity: str, pin: bool | None = None) -> None: ...
    async def unload(self, identity: str) -> None: ...
    async def forget(self, source: str, name: str) -> None: ...
    async def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]: ...
    async def status(self) -> EngineStatus: ...
