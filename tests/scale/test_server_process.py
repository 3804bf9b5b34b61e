"""The process of a replica's server, which cannot start. `test_pair.py` has servers that can."""

import asyncio

import pytest

from lorax_server.scale.server_process import Order, ReplicaError, ServerProcess
from tests.scale.servers import INGRESS_KEY


def test_a_server_that_cannot_start_says_why() -> None:
    async def run() -> None:
        server = ServerProcess(Order(["--model-id=/nowhere/at/all", "--hub-offline=true"]), "127.0.0.1", INGRESS_KEY)
        try:
            with pytest.raises(ReplicaError, match=r"could not start: lorax: .*/nowhere/at/all"):
                await server.wait_until_ready()
            with pytest.raises(ReplicaError, match="has ended"):
                server.check()
        finally:
            await server.stop()

    asyncio.run(run())
