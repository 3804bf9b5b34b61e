"""Server processes that fail to start. See `test_two_servers.py` for running servers."""

import asyncio

import pytest

from lorax_server.scale.server_process import ReplicaError, ServerProcess
from tests.scale.cluster import SECRET


def test_failed_server_start_reports_reason() -> None:
    async def run() -> None:
        server = ServerProcess(["--model-id=/nowhere/at/all", "--hub-offline=true"], "127.0.0.1", SECRET)
        try:
            with pytest.raises(ReplicaError, match=r"could not start: lorax: .*/nowhere/at/all"):
                await server.wait_until_ready()
        finally:
            await server.stop()

    asyncio.run(run())
