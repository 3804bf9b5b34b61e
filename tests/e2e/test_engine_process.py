"""The engine in a separate process, with one and two ranks."""

import asyncio
import copy
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.adapters.host import UNIT_BYTES, prepare
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.distributed import FakeGroup
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import AdapterError, AdapterNotFoundError, ConfigError, EngineError, InputError
from lorax_server.launch import make_client
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.registry import build_model
from lorax_server.types import AdapterRef, EngineStatus, Merge, Output, Request, SamplingParams, StopParams
from tests.builders import CPU
from tests.parity.adapters.served import open_adapter
from tests.parity.oracle import oracle_greedy
from tests.parity.test_engine import ADAPTER_OF_REQUEST, NEW_TOKENS, make_prompts, write_adapter
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

ARCHITECTURES = {
    "llama-gqa": 2,
    "gpt2": 4,
    "neox-parallel": 4,
    "opt-pre-norm": 4,
    "mistral-window": 2,
    "qwen2-bias": 2,
    "qwen3-head-norm": 2,
}  # number of KV heads by architecture
RANKS = (2, 5)
NUM_BLOCKS, BLOCK_SIZE = 12, 4


def write_models(name: str, folder: Path) -> list[Any]:
    """Write a model and its adapters. Return the transformers model without and with each adapter."""
    oracle = make_oracle(name)
    oracle.save_pretrained(folder / "model")
    adapted = [write_adapter(copy.deepcopy(oracle), name, rank, folder / f"rank-{rank}") for rank in RANKS]
    return [oracle, *adapted]


def make_config(folder: Path, name: str = "llama-gqa", ranks: int = 1, **settings: Any) -> EngineConfig:
    """Make a config with small limits, so that requests compete for all resources."""
    model = VARIANTS[name].config()
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    block_bytes = 2 * model.num_hidden_layers * ARCHITECTURES[name] // ranks * head_dim * BLOCK_SIZE * 4
    return EngineConfig(
        ModelConfig(folder / "model"),
        tensor_parallel=ranks,
        sources=SourceConfig((folder,)),
        **{
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "max_step_tokens": 12,
            "max_length": 48,
            "cache_bytes": NUM_BLOCKS * block_bytes,
            "adapter_bytes": 2**20,
        }
        | settings,
    )


def adapter_units(name: str, folder: Path, ranks: int) -> list[int]:
    """Return the number of memory units per adapter on a rank."""
    group = FakeGroup(0, ranks)
    tensors = checkpoint(name, make_oracle(name))
    targets = collect_adapter_targets(build_model(VARIANTS[name].config(), make_weights(tensors, CPU, group)))
    adapters = [open_adapter(folder / f"rank-{rank}", targets) for rank in RANKS]
    return [prepare(adapter, targets, torch.float32, group).units for adapter in adapters]


@asynccontextmanager
async def started(config: EngineConfig, **options: Any) -> AsyncIterator[RemoteEngine]:
    client = make_client(config, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def run_request(
    client: RemoteEngine, prompt: Sequence[int], adapter: str | None = None, **more: Any
) -> list[Output]:
    if adapter is not None:
        more["adapter_identity"] = (await client.resolve([AdapterRef("local", adapter)])).identity
    stop = StopParams(max_new_tokens=more.pop("max_new_tokens", NEW_TOKENS))
    request = Request(client.new_id(), list(prompt), more.pop("sampling", SamplingParams()), stop, **more)
    return [output async for output in client.generate(request)]


async def generate_and_disconnect(client: RemoteEngine, prompt: Sequence[int], count: int) -> None:
    """Read a few tokens and disconnect."""
    request = Request(client.new_id(), list(prompt), SamplingParams(), StopParams(max_new_tokens=NEW_TOKENS))
    response = client.generate(request)
    async for _ in response:
        count -= 1
        if count <= 0:
            break
    await response.aclose()


async def until_healthy(client: RemoteEngine) -> None:
    while not client.is_healthy:
        await asyncio.sleep(0.05)


def check_concurrent_requests(config: EngineConfig, oracles: list[Any]) -> EngineStatus:
    """Send requests and abort some. The others must return the oracle's tokens.

    The engine is paused until the first half has been sent, so that requests compete for rows and blocks however fast
    the engine is. The second half comes at random times.
    """
    prompts, chance = make_prompts(), random.Random(0)

    async def run_requests() -> tuple[list[list[Output]], EngineStatus]:
        async with started(config) as client:
            names = [f"rank-{rank}" for rank in RANKS]
            actual = [await client.resolve([AdapterRef("local", name)]) for name in names]
            identities = ["", *(each.identity for each in actual)]
            tasks: list[asyncio.Task[list[Output] | None]] = []
            os.kill(engine_pid(client), signal.SIGSTOP)
            try:
                for i, prompt in enumerate(prompts):
                    tasks.append(
                        asyncio.create_task(
                            run_request(client, prompt, adapter_identity=identities[ADAPTER_OF_REQUEST[i]])
                        )
                    )
                    tasks.append(asyncio.create_task(generate_and_disconnect(client, prompt, chance.randrange(5))))
                    await asyncio.sleep(chance.choice([0, 0, 0.005]))
                    if i == len(prompts) // 2:
                        os.kill(engine_pid(client), signal.SIGCONT)
            finally:
                os.kill(engine_pid(client), signal.SIGCONT)
            responses = [response for response in await asyncio.gather(*tasks) if response is not None]
            return responses, await client.status()

    responses, status = asyncio.run(run_requests())
    tensors, compared = dict(oracles[0].state_dict()), 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        expected = oracle_greedy(oracles[ADAPTER_OF_REQUEST[i]], prompt, NEW_TOKENS, tensors)
        assert [output.tokens[0].token_id for output in response][: len(expected)] == expected
        compared += len(expected)
    assert compared > 100
    return status


# --- The same as alone ------------------------------------------------------------------------------------------------


# `make test` runs these engines in one process, in tests/parity/test_engine.py.
@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batched_requests_match_single_requests(name: str, ranks: int, tmp_path: Path) -> None:
    oracles = write_models(name, tmp_path)
    adapter_bytes = UNIT_BYTES * max(adapter_units(name, tmp_path, ranks))  # for one at a time
    config = make_config(tmp_path, name, ranks, adapter_bytes=adapter_bytes, adapter_eviction_delay_s=0.0)
    status = check_concurrent_requests(config, oracles)
    assert status.preemptions > 0
    assert status.chunks > 0
    assert status.prefix_tokens > 0
    assert status.cache_evictions > 0
    assert status.adapters_evicted_from_device > 0
    assert (status.num_blocks, status.free_blocks) == (NUM_BLOCKS, NUM_BLOCKS)


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sampling_depends_only_on_request(ranks: int, tmp_path: Path) -> None:
    write_models("llama-gqa", tmp_path)
    prompts = make_prompts()

    async def run() -> None:
        async with started(make_config(tmp_path, ranks=ranks)) as client:

            async def draw(i: int) -> list[int]:
                adapter = f"rank-{RANKS[ADAPTER_OF_REQUEST[i] - 1]}" if ADAPTER_OF_REQUEST[i] else None
                sampling = SamplingParams(do_sample=True, temperature=0.9, top_p=0.9, seed=i)
                response = await run_request(client, prompts[i], adapter, sampling=sampling)
                return [output.tokens[0].token_id for output in response]

            alone = [await draw(i) for i in range(len(prompts))]
            assert await asyncio.gather(*(draw(i) for i in range(len(prompts)))) == alone
            assert (await client.status()).preemptions > 0

    asyncio.run(run())


# --- Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_engines")
def test_bad_requests_do_not_affect_other_requests(tmp_path: Path) -> None:
    write_models("llama-gqa", tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no")
    prompt = make_prompts()[0]

    async def run() -> None:
        async with started(make_config(tmp_path)) as client:
            alone = [output.tokens[0].token_id for output in await run_request(client, prompt)]
            with pytest.raises(InputError, match="beyond the vocabulary of 97"):
                await run_request(client, [5, 97])
            with pytest.raises(InputError, match="must be <= 48"):
                await run_request(client, [5] * 40)
            with pytest.raises(InputError, match="cannot be empty"):
                await run_request(client, [])
            with pytest.raises(AdapterNotFoundError):
                await run_request(client, prompt, "../../etc")
            with pytest.raises(AdapterError, match="adapter_config"):
                await run_request(client, prompt, "broken")
            with pytest.raises(InputError, match="logit_bias"):
                await run_request(client, prompt, sampling=SamplingParams(logit_bias={97: 1.0}))
            assert [output.tokens[0].token_id for output in await run_request(client, prompt)] == alone
            assert client.is_healthy

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
def test_dead_rank_restarts_all_ranks(tmp_path: Path) -> None:
    write_models("llama-gqa", tmp_path)
    prompt, others = make_prompts()[0], forked_pids()

    async def run() -> None:
        async with started(make_config(tmp_path, ranks=2, max_length=None, cache_bytes=2**20)) as client:
            alone = [output.tokens[0].token_id for output in await run_request(client, prompt)]
            engine = engine_pid(client)
            (rank,) = forked_pids() - others - {engine}
            os.kill(rank, signal.SIGSTOP)  # no step finishes, so both requests keep running
            running = [asyncio.create_task(run_request(client, prompt)) for _ in range(2)]
            while len(client._streams) < len(running):
                await asyncio.sleep(0.01)
            os.kill(rank, signal.SIGKILL)
            for each in running:
                with pytest.raises(EngineError, match="rank 1 exited with code -9"):
                    await each
            assert not client.is_healthy
            await until_healthy(client)
            assert not is_alive(engine)
            assert not is_alive(rank)
            assert [output.tokens[0].token_id for output in await run_request(client, prompt)] == alone
            last = forked_pids() - others
            assert len(last) == 2
        assert not any(is_alive(process) for process in last)

    asyncio.run(run())


def engine_pid(client: RemoteEngine) -> int:
    assert client._channel is not None
    assert client._channel._process is not None
    assert client._channel._process.pid is not None
    return client._channel._process.pid


def forked_pids() -> set[int]:
    """Return the process ids of all engines and ranks, forked from the process with torch."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return {int(child) for child in Path(f"/proc/{server}/task/{server}/children").read_text().split()}


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
def test_preloaded_adapters_are_ready_at_start_and_restart(tmp_path: Path) -> None:
    write_models("llama-gqa", tmp_path)
    config = make_config(tmp_path, preload=(("local", "rank-2"), ("local", "rank-5")))

    async def run() -> None:
        async with started(config) as client:
            assert (await client.status()).adapters_on_device == 2
            os.kill(killed := engine_pid(client), signal.SIGKILL)
            while not client.is_healthy or engine_pid(client) == killed:
                await asyncio.sleep(0.01)
            assert (await client.status()).adapters_on_device == 2

    asyncio.run(run())
    with pytest.raises(AdapterNotFoundError, match="'rank-7'"):
        asyncio.run(make_client(make_config(tmp_path, preload=(("local", "rank-7"),))).start())


@pytest.mark.usefixtures("forked_engines")
def test_request_can_merge_adapters(tmp_path: Path) -> None:
    """Merging with a zero-weight adapter has no effect."""
    write_models("llama-gqa", tmp_path)
    prompt = make_prompts()[1]

    async def run() -> None:
        async with started(make_config(tmp_path)) as client:
            one, other = AdapterRef("local", "rank-2"), AdapterRef("local", "rank-5")
            responses = []
            for refs, weights in (([one], (0.5,)), ([one, other], (0.5, 0.0)), ([one, other], (0.5, 0.5))):
                merged = await client.resolve(refs, Merge(weights))
                request = Request(client.new_id(), prompt, SamplingParams(), StopParams(max_new_tokens=8))
                request = replace(request, adapter_identity=merged.identity)
                responses.append([output.tokens[0].token_id async for output in client.generate(request)])
            assert responses[0] == responses[1] != responses[2]

    asyncio.run(run())


@pytest.mark.usefixtures("forked_engines")
def test_engine_start_failure_reports_reason(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=r"config\.json"):
            await make_client(EngineConfig(ModelConfig(tmp_path / "nothing"))).start()

    asyncio.run(run())


@pytest.mark.usefixtures("forked_engines")
def test_rank_start_failure_reports_reason(tmp_path: Path) -> None:
    """Start three ranks for four heads."""
    write_models("llama-gqa", tmp_path)

    async def run() -> None:
        with pytest.raises(EngineError, match="is not divisible by 3"):
            await make_client(EngineConfig(ModelConfig(tmp_path / "model"), tensor_parallel=3)).start()

    asyncio.run(run())
