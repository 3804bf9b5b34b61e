"""Decode steps with static padded inputs match steps with new inputs."""

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.adapters.host import HostAdapter, prepare
from lorax_server.adapters.target import TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import select_ops
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import AdapterOp, LoadOp, NewSequence, StepPlan, StepResult, UnloadOp
from lorax_server.types import SamplingParams, StopParams
from lorax_server.weights import Weights
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.copier import Copier, CopyStream
from lorax_server.worker.graphs import DECODE_GRAPH_SIZES, GraphSizes, graph_sizes
from lorax_server.worker.runner import PagedRunner
from tests.lora import GivenAdapter, random_factors
from tests.parity.adapters.served import make_model

MAX_NUM_SEQS, BLOCK_SIZE, MAX_LENGTH = 6, 4, 32
RANKS = (1, 4, 16, 32)
NAMES = ("llama-gqa", "gpt2", "opt-projection", "neox-parallel", "llama-rope-dynamic-beyond", "qwen3-window")
CPU = torch.device("cpu")


def test_graph_sizes_end_with_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(64)[-3:] == [48, 56, 64]
    assert graph_sizes(1000) == list(DECODE_GRAPH_SIZES)
    assert list(DECODE_GRAPH_SIZES) == [1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256]


@pytest.mark.parametrize(
    ("name", "num_warmup_layers"),
    [("gpt2", 2), ("opt-projection", 2), ("llama-gqa", 2), ("qwen3-window", 2), ("exaone4", 3)],
)
def test_warmup_layers_cover_all_layer_types(name: str, num_warmup_layers: int) -> None:
    """EXAONE's third layer is the first one with full attention and without RoPE."""
    assert make_model(name, CPU).model.num_warmup_layers == num_warmup_layers


# --- Random step plans ------------------------------------------------------------------------------------------------


def make_host_adapters(model: PagedCausalLM) -> list[HostAdapter]:
    """Prepare adapters with several ranks. The last two lack modules or have only a bias.

    Only the adapter that lacks modules can change modules that graphs do not support.
    """
    targets, vocab_size = collect_adapter_targets(model), model.config.vocab_size
    dtype, device = model.lm_head.linear.weight.dtype, model.device
    adapters = []
    ranks = (*RANKS[:-1], 512) if device.type == "cuda" else RANKS
    for seed, rank in enumerate((*ranks, 8)):
        factors = random_factors(targets, rank, seed)
        unrecorded = {target.name for target in model.unrecorded_targets}
        names = list(factors)[::3] if seed == len(RANKS) else [name for name in factors if name not in unrecorded]
        modules = {name: ModuleWeights(*factors[name], 0.5 / rank) for name in names}
        adapters.append(GivenAdapter(modules, vocab_size))
    norms = [name for name, target in targets.items() if target.kind is TargetKind.NORM and target.weight is not None]
    for norm in norms[:1]:
        size = targets[norm].outputs.full
        adapters.append(GivenAdapter({norm: ModuleWeights(weight=torch.linspace(0.5, 1.5, size))}, vocab_size))
    return [prepare(adapter, targets, dtype, FakeGroup()) for adapter in adapters]


class RandomPlans:
    """Creates prefill and decode plans for sequences that join and leave, with changing adapters."""

    def __init__(self, num_adapters: int, seed: int, mixed: bool = True, sampling: bool = True) -> None:
        self._draw = random.Random(seed)
        self._num_adapters = num_adapters
        self._sampling = sampling
        self._mixed = mixed
        self._step = 0
        self._lengths: dict[int, int] = {}  # by slot
        self._adapters: dict[int, int] = {}  # index of each slot's adapter
        self._new: list[NewSequence] = []
        self.loaded: dict[int, int] = {}  # adapter at each index

    def plans(self, count: int) -> Iterator[StepPlan]:
        for _ in range(count):
            yield self._plan()

    def _plan(self) -> StepPlan:
        self._step += 1
        draw, ops = self._draw, self._change_adapters()
        for slot in list(self._lengths):
            if self._lengths[slot] >= MAX_LENGTH - 1 or draw.random() < 0.05:
                del self._lengths[slot], self._adapters[slot]
        self._new, blocks = [], []
        for slot in range(MAX_NUM_SEQS):
            if slot not in self._lengths and draw.random() < 0.2 and (self._mixed or self._step == 1):
                blocks += self._join(slot)
        order = sorted(self._lengths, key=lambda slot: self._adapters[slot])
        prompts = {new.slot: len(new.token_ids) for new in self._new}
        counts = np.array([prompts.get(slot, 1) for slot in order], np.int64)
        starts = np.array([0 if slot in prompts else self._lengths[slot] for slot in order], np.int64)
        for slot in order:
            self._lengths[slot] = prompts.get(slot, self._lengths[slot] + 1)
        return StepPlan(
            self._step,
            np.array(order, np.int64),
            starts,
            counts,
            np.ones(len(order), bool),
            np.zeros(len(order), bool),
            np.array([self._adapters[slot] for slot in order], np.int64),
            tuple(self._new),
            np.array(blocks, np.int64).reshape(-1, 3),
            tuple(ops),
        )

    def _join(self, slot: int) -> list[list[int]]:
        draw = self._draw
        prompt = [draw.randrange(3, 90) for _ in range(draw.randrange(1, 8))]
        options: dict[str, Any] = {}
        if self._sampling and draw.random() < 0.6:
            options = {"do_sample": True, "seed": draw.randrange(1000), "temperature": 0.8, "top_k": 20, "top_p": 0.9}
        if self._sampling and draw.random() < 0.3:
            options |= {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "num_alternatives": 2}
        self._new.append(NewSequence(slot, prompt, len(prompt), SamplingParams(**options), StopParams()))
        self._lengths[slot] = 0
        self._adapters[slot] = draw.choice([0, *self.loaded])
        per_slot = MAX_LENGTH // BLOCK_SIZE
        return [[slot, column, slot * per_slot + column] for column in range(per_slot)]

    def _change_adapters(self) -> list[AdapterOp]:
        ops: list[AdapterOp] = []
        draw = self._draw
        for index in list(self.loaded):
            if index not in self._adapters.values() and draw.random() < 0.3:
                del self.loaded[index]
                ops.append(UnloadOp(index))
        absent = [number for number in range(self._num_adapters) if number not in self.loaded.values()]
        if absent and draw.random() < 0.5:
            number = draw.choice(absent)
            index = min(set(range(1, self._num_adapters + 1)) - set(self.loaded))
            self.loaded[index] = number
            ops.append(LoadOp(str(number), index, 0))
        return ops


@pytest.fixture(autouse=True)
def close_rigs() -> Iterator[None]:
    yield
    while Rig.made:
        Rig.made.pop().close()


class Rig:
    """A runner with loaded adapters and blocks for all slots."""

    made: ClassVar[list["Rig"]] = []  # in this test

    def __init__(
        self,
        model: PagedCausalLM,
        hosts: list[HostAdapter],
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_length: int = MAX_LENGTH,
        block_size: int = BLOCK_SIZE,
        **options: Any,
    ) -> None:
        Rig.made.append(self)
        targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
        self._hosts, self._units = hosts, max((host.units for host in hosts), default=1)
        self._memory = None
        if hosts:
            num_units = self._units * (len(hosts) + 1)
            copier = Copier(CopyStream(model.device)) if model.device.type == "cuda" else None
            self._memory = AdapterMemory(targets, dtype, model.device, num_units, len(hosts) + 1, copier=copier)
        self.runner = PagedRunner(
            model,
            num_blocks=max_num_seqs * -(-max_length // block_size),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_length=max_length,
            memory=self._memory,
            **options,
        )

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def submit(self, plan: StepPlan) -> Any:
        for op in plan.adapter_ops:
            assert self._memory is not None
            if isinstance(op, LoadOp):
                self._memory.load(op.index, self._hosts[int(op.identity)], op.index * self._units)
                self._memory.wait_for(op.index)
            elif isinstance(op, UnloadOp):
                self._memory.unload(op.index)
        return self.runner.submit(plan)

    def collect(self, plan: StepPlan) -> StepResult:
        return self.runner.collect(self.submit(plan))

    def run(self, plan: StepPlan) -> list[int]:
        return self.collect(plan).token_ids


def check_same(model: PagedCausalLM, hosts: list[HostAdapter], seed: int, *, steps: int = 60, capture: bool) -> None:
    eager = Rig(model, hosts)
    padded = Rig(
        model, hosts, graph_sizes=GraphSizes(graph_sizes(MAX_NUM_SEQS - 1)), capture=capture
    )  # the largest batch has none
    num_tokens = 0
    for plan in RandomPlans(len(hosts), seed).plans(steps):
        expected = eager.run(plan)
        assert padded.run(plan) == expected
        num_tokens += len(expected)
    assert num_tokens > steps


@pytest.mark.parametrize("name", NAMES)
def test_padded_inputs_match_unpadded_tokens(name: str) -> None:
    model = make_model(name, CPU)
    check_same(model, make_host_adapters(model), len(name), steps=16, capture=False)


def test_padded_inputs_without_adapters_match_unpadded_tokens() -> None:
    check_same(make_model("llama-gqa", CPU), [], 1, steps=20, capture=False)


def test_padding_rows_write_no_kv_slots() -> None:
    rig = Rig(make_model("llama-gqa", CPU), [], graph_sizes=GraphSizes([4]), capture=False)
    run_random_sequences = RandomPlans(0, seed=1, mixed=False)
    plans = list(run_random_sequences.plans(3))
    for plan in plans:
        rig.run(plan)
    assert rig.runner._graphs is not None
    inputs, count = rig.runner._graphs._inputs, len(plans[-1].slots)
    assert 0 < count < 4
    assert inputs.input_lengths.tolist() == [1] * count + [0] * (4 - count)
    assert inputs.cache_lengths.tolist() == [*plans[-1].starts, *[0] * (4 - count)]
    assert inputs.kv_slots[count:].tolist() == [-1] * (4 - count)
    for column in (inputs.position_ids, inputs.adapter_indices, inputs.prompt_lengths):
        assert column[count:].tolist() == [0] * (4 - count)


# --- On a GPU ---------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda")


def half_model(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> PagedCausalLM:
    """Create a half-precision model with sizes that the fastest kernels support."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        vocab_size=96,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    tensors = {name: tensor * 10 for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    weights = Weights(tensors, device=GPU, dtype=dtype, process_group=FakeGroup(), ops=select_ops(GPU))
    return FlashLlamaForCausalLM("", config, weights)


def gpu_model(name: str) -> PagedCausalLM:
    model = make_model(name, GPU)
    assert model.ops.records_graphs, "a GPU that runs these tests has kernels"
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_graphs_match_eager_tokens(name: str, seed: int) -> None:
    """Graphs are captured without adapters and replayed with adapters of any rank and target modules."""
    model = gpu_model(name)
    check_same(model, make_host_adapters(model), seed, capture=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_graphs_match_eager_tokens(dtype: torch.dtype) -> None:
    model = half_model(dtype, (4, 2), 64)
    check_same(model, make_host_adapters(model), 1, capture=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("with_adapters", [False, True])
def test_decode_step_does_not_synchronize_host(sampling: bool, with_adapters: bool) -> None:
    model = gpu_model("llama-gqa")
    rig = Rig(
        model, make_host_adapters(model) if with_adapters else [], graph_sizes=GraphSizes(graph_sizes(MAX_NUM_SEQS))
    )
    run_random_sequences = RandomPlans(len(RANKS) * with_adapters, seed=3, sampling=sampling)
    num_checked = 0
    for number, plan in enumerate(run_random_sequences.plans(40)):
        checked = number > 5 and bool((plan.counts == 1).all()) and len(plan.slots) > 0
        num_checked += checked
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            ticket = rig.submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rig.runner.collect(ticket)
    assert num_checked > 5
