"""The engine with every architecture: each request matches transformers and PEFT."""

import copy
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lorax_server.adapters.host import UNIT_BYTES, prepare
from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.distributed import FakeGroup
from lorax_server.engine.engine import Engine
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import build_model
from lorax_server.types import AdapterRef, EngineStatus, Output, Request, SamplingParams, StopParams
from lorax_server.worker.memory import block_bytes
from lorax_server.worker.worker import build_paged_worker
from tests.grids import slow_except
from tests.lora import save_adapter
from tests.parity.adapters.cases import ATTENTION, CASES, randomize
from tests.parity.adapters.served import open_adapter
from tests.parity.oracle import oracle_logits, oracle_text
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

BLOCK_SIZE = 4
NUM_BLOCKS = 12  # enough for the longest request
NEW_TOKENS = 14
WAIT_S = 120  # maximum wait for threads
RANKS = (2, 5)  # adapter ranks for each model
ADAPTER_OF_REQUEST = [0, 1, 0, 2, 0, 0, 2, 1, 0, 0, 1, 2]  # 0: the base model


class Models(NamedTuple):
    """One architecture in this server and in transformers, without adapters and with each adapter."""

    ours: PagedCausalLM
    oracles: list[Any]
    folders: list[Path]
    tensors: dict[str, torch.Tensor]


def make_models(name: str, folder: Path, device: torch.device) -> Models:
    oracle = make_oracle(name)
    tensors = checkpoint(name, oracle)
    ours = build_model(VARIANTS[name].config(), make_weights(tensors, device))
    folders = [folder / f"rank-{rank}" for rank in RANKS]
    adapted = [write_adapter(copy.deepcopy(oracle), name, *each) for each in zip(RANKS, folders, strict=True)]
    return Models(ours, [oracle, *adapted], folders, tensors)  # tiny oracles are fast on the CPU


def write_adapter(oracle: Any, name: str, rank: int, folder: Path) -> Any:
    """Write an adapter as PEFT trains and saves it; return the model with it."""
    family = name.split("-", maxsplit=1)[0].replace("galactica", "opt")
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=ATTENTION[family],
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
        use_rslora=rank == 5,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(oracle, config)
        randomize(model)
        torch.manual_seed(rank)
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.normal_(0, 0.2)
        save_adapter(model, folder)
    return model.eval().get_base_model()


def units(models: Models) -> list[int]:
    targets = collect_adapter_targets(models.ours)
    return [prepare(open_adapter(f, targets), targets, torch.float32, FakeGroup()).units for f in models.folders]


def make_engine(models: Models, max_steps_in_flight: int = 2, **settings: Any) -> Engine:
    """Create an engine with few blocks, small steps and memory for one adapter at a time."""
    small: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_step_tokens": 12,
        "max_length": 48,
        "cache_bytes": NUM_BLOCKS * block_bytes(models.ours, BLOCK_SIZE),
        "adapter_bytes": max(units(models)) * UNIT_BYTES,
        "sources": SourceConfig((models.folders[0].parent,)),
        "adapter_eviction_delay_s": 0.0,
    }
    config = EngineConfig(
        ModelConfig(Path("in-memory")),
        max_steps_in_flight=max_steps_in_flight,
        block_size=BLOCK_SIZE,
        **small | settings,
    )
    return assemble_engine(config, build_paged_worker(models.ours, config, FakeGroup()))


class Workload:
    """Requests that arrive at random times. Some are canceled."""

    def __init__(self, engine: Engine, folders: Sequence[Path], seed: int = 0) -> None:
        self.engine = engine
        self.folders = folders
        self.rng = random.Random(seed)
        self.request_outputs: dict[int, list[Output]] = {}

    def step(self) -> None:
        if not self.engine.is_busy:
            self.engine.wake.wait(0.01)
        self.engine.wake.clear()
        for output in self.engine.step():
            assert output.failure is None, output.failure
            self.request_outputs.setdefault(output.request_id, []).append(output)

    def add(self, request_id: int, prompt: list[int], adapter: int, aborted: bool = False, **more: Any) -> None:
        identity = ""
        if adapter:
            result = self.engine.resolve([AdapterRef("local", self.folders[adapter - 1].name)])
            identity = result.result(WAIT_S).identity  # without steps, whose number would depend on their speed
        sampling = more.pop("sampling", SamplingParams())
        stop = StopParams(max_new_tokens=NEW_TOKENS)
        self.engine.add(Request(request_id, prompt, sampling, stop, adapter_identity=identity, **more))
        for _ in range(self.rng.choice([0, 1, 2])):
            self.step()
        if aborted:
            self.engine.abort(request_id)

    def finish(self) -> EngineStatus:
        while self.engine.has_work:
            self.step()
        status = self.engine.status()
        self.engine.close()
        return status

    def tokens(self, request_id: int) -> list[int]:
        return [output.tokens[0].token_id for output in self.request_outputs[request_id]]


def make_prompts() -> list[list[int]]:
    """Return prompts with shared prefixes and long prompts that together exceed the cache."""
    rng = random.Random(0)
    beginning = rng.choices(range(3, 97), k=9)
    return [
        [*(beginning if i % 2 else []), *rng.choices(range(3, 97), k=rng.choice([1, 3, 8, 17]))]
        for i in range(len(ADAPTER_OF_REQUEST))
    ]


# Variants with special lengths or caches. test_paged.py compares all architectures.
QUICK = ("gpt2", "llama-fp8-kv", "mistral-window")


@pytest.mark.parametrize("name", slow_except(QUICK, VARIANTS))
def test_batched_requests_match_single_requests(name: str, device: torch.device, tmp_path: Path) -> None:
    models = make_models(name, tmp_path, device)
    workload = Workload(make_engine(models), models.folders)
    prompts = make_prompts()
    for i, prompt in enumerate(prompts):
        workload.add(i, prompt, adapter=ADAPTER_OF_REQUEST[i])
        workload.add(100 + i, prompt, adapter=ADAPTER_OF_REQUEST[-i], aborted=True)
    status = workload.finish()
    compared = 0
    for i, prompt in enumerate(prompts):
        ours = workload.tokens(i)
        expected = oracle_text(models.oracles[ADAPTER_OF_REQUEST[i]], prompt, ours, models.tensors)
        assert len(ours) == NEW_TOKENS
        assert ours[: len(expected)] == expected
        compared += len(expected)
    assert compared > 100
    assert status.preemptions > 0
    assert status.chunks > 0
    assert status.prefix_tokens > 0
    assert status.cache_evictions > 0
    assert status.adapters_evicted_from_device > 0
    assert status.free_blocks == NUM_BLOCKS


def test_non_lora_adapters_match_peft(tmp_path: Path) -> None:
    cases = [CASES[name] for name in ("ia3", "vera", "llama-gqa-ln-tuning", "saved-block")]
    folders = [tmp_path / f"adapter{number}" for number in range(len(cases))]
    for case, folder in zip(cases, folders, strict=True):
        case.write(folder)
    oracle = make_oracle("llama-gqa")
    tensors = checkpoint("llama-gqa", oracle)
    ours = build_model(VARIANTS["llama-gqa"].config(), make_weights(tensors, torch.device("cpu")))
    oracles = [oracle, *(case.oracle(folder) for case, folder in zip(cases, folders, strict=True))]
    models = Models(ours, oracles, folders, tensors)
    workload = Workload(make_engine(models), folders)
    prompts = make_prompts()[:8]
    for i, prompt in enumerate(prompts):
        workload.add(i, prompt, adapter=i % len(oracles))
    assert workload.finish().adapters_evicted_from_device > 0
    for i, prompt in enumerate(prompts):
        response = workload.tokens(i)
        expected = oracle_text(oracles[i % len(oracles)], prompt, response, tensors)
        assert len(response) == NEW_TOKENS
        assert len(expected) > 3
        assert response[: len(expected)] == expected


def test_preemption_does_not_change_tokens(device: torch.device, tmp_path: Path) -> None:
    """Other tenants arrive while one tenant uses all slots. Covers greedy, sampled and adapter requests."""
    models = make_models("llama-gqa", tmp_path, device)
    drawn = SamplingParams(do_sample=True, temperature=0.9, seed=7, repetition_penalty=1.1)
    prompts = make_prompts()

    def run(is_alone: bool) -> tuple[Workload, EngineStatus]:
        room = {"cache_bytes": 8 * NUM_BLOCKS * block_bytes(models.ours, BLOCK_SIZE)}
        engine = make_engine(models, adapter_bytes=2 * max(units(models)) * UNIT_BYTES, **room)
        workload = Workload(engine, models.folders)
        for i, prompt in enumerate(prompts):
            tenant = "big" if i < 6 else f"small {i}"
            workload.add(
                i,
                prompt,
                adapter=ADAPTER_OF_REQUEST[i],
                sampling=drawn if i % 3 == 0 else SamplingParams(),
                tenant=tenant,
            )
            while is_alone and engine.has_work:
                workload.step()
        return workload, workload.finish()

    (workload, status), (alone, status_alone) = run(is_alone=False), run(is_alone=True)
    assert status.fairness_preemptions > 0
    assert status.preemptions == status_alone.preemptions == status_alone.fairness_preemptions == 0
    for i in range(len(prompts)):
        assert workload.tokens(i) == alone.tokens(i)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_prompt_logprobs_and_alternatives_match_transformers(name: str, device: torch.device, tmp_path: Path) -> None:
    models = make_models(name, tmp_path, device)
    workload = Workload(make_engine(models), models.folders)
    prompts = make_prompts()
    for i, prompt in enumerate(prompts):
        workload.add(
            i,
            prompt,
            adapter=ADAPTER_OF_REQUEST[i],
            prompt_logprobs=i % 2 == 1,
            sampling=SamplingParams(num_alternatives=i % 4),
        )
    status = workload.finish()
    assert status.preemptions > 0
    assert status.chunks > 0
    for i, prompt in enumerate(prompts):
        outputs = workload.request_outputs[i]
        ids = [*prompt, *workload.tokens(i)]
        logprobs = oracle_logits(models.oracles[ADAPTER_OF_REQUEST[i]], ids, len(prompt), models.tensors).log_softmax(
            -1
        )
        for place, output in enumerate(outputs):
            at = logprobs[len(prompt) - 1 + place]
            token_id, logprob, alternatives = output.tokens[0]
            assert logprob == pytest.approx(float(at[token_id]), abs=1e-3)
            assert (alternatives is not None) == (i % 4 > 0)
            if alternatives is not None:
                best = at.topk(i % 4)
                assert alternatives.logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
        actual = outputs[0].prompt_logprobs
        if i % 2:
            expected = logprobs[: len(prompt) - 1].gather(-1, torch.tensor(prompt[1:])[:, None])
            assert actual == pytest.approx(expected.flatten().tolist(), abs=1e-3)
            best = logprobs[: len(prompt) - 1].topk(i % 4)
            tops = outputs[0].prompt_alternatives or []
            assert len(tops) == len(prompt) - 1
            for place, top in enumerate(tops):
                assert top.logprobs == pytest.approx(best.values[place].tolist(), abs=1e-3)
                assert top.logprobs == pytest.approx(logprobs[place][top.token_ids].tolist(), abs=1e-3)
        else:
            assert actual is None
            assert outputs[0].prompt_alternatives is None
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        assert all(output.prompt_alternatives is None for output in outputs[1:])


def test_sampling_depends_only_on_request(device: torch.device, tmp_path: Path) -> None:
    """Run each request alone and in batches with different arrival times."""
    models = make_models("llama-gqa", tmp_path, device)
    prompts = make_prompts()
    wishes: dict[str, Any]
    wishes = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2}

    def run(wanted: Sequence[int], max_steps_in_flight: int, seed: int) -> Workload:
        workload = Workload(make_engine(models, max_steps_in_flight), models.folders, seed)
        for i in wanted:
            workload.add(i, prompts[i], adapter=ADAPTER_OF_REQUEST[i], sampling=SamplingParams(seed=i, **wishes))
        workload.finish()
        return workload

    workloads = [
        run(range(len(prompts)), max_steps_in_flight, seed) for max_steps_in_flight, seed in ((1, 0), (2, 1), (2, 2))
    ]
    for i in range(len(prompts)):
        alone = run([i], 1, 0).tokens(i)
        assert all(workload.tokens(i) == alone for workload in workloads)
