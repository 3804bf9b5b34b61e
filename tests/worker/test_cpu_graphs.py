"""CPU graphs give bitwise the same results as eager steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.adapters.host import HostAdapter, prepare
from lorax_server.adapters.target import TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import reference, select_ops
from lorax_server.layers import rotary
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import LoadOp, MoveOp, NewSequence, StepPlan
from lorax_server.types import SamplingParams, StopParams
from lorax_server.weights import Weights
from lorax_server.worker.graphs import MAX_CPU_GRAPH_TOKENS, GraphKey, GraphSizes, StepGraphs
from lorax_server.worker.worker import uses_cpu_graphs
from tests.grids import slow_except
from tests.lora import GivenAdapter, random_factors
from tests.parity.adapters.served import make_model
from tests.parity.variants import QUICK, VARIANTS
from tests.worker.test_graphs import BLOCK_SIZE, CPU, MAX_LENGTH, RandomPlans, Rig, make_host_adapters

SIZES = GraphSizes.choose_for_cpu()
UNRECORDED = "llama-fp8-kv"  # uses reference attention


class WatchedRig(Rig):
    """A rig that records the hidden states of its last step."""

    def __init__(self, model: PagedCausalLM, hosts: Sequence[HostAdapter], **options: Any) -> None:
        super().__init__(model, list(hosts), **options)
        self.hidden = torch.empty(0)
        self.longest = 0  # sequences of all steps
        forward: Any = self.runner._forward

        def keep(*arguments: Any) -> torch.Tensor:
            self.hidden = forward(*arguments).clone()
            return self.hidden

        self.runner._forward = keep  # type: ignore[assignment]

    @property
    def graphs(self) -> StepGraphs:
        assert self.runner._graphs is not None
        return self.runner._graphs

    @property
    def kinds(self) -> set[GraphKey]:
        return set(self.graphs._graphs)


def make_pair(
    model: PagedCausalLM, hosts: Sequence[HostAdapter], sizes: GraphSizes = SIZES, **shape: int
) -> tuple[WatchedRig, WatchedRig]:
    return WatchedRig(model, hosts, **shape), WatchedRig(model, hosts, graph_sizes=sizes, **shape)


def check_step(eager: WatchedRig, recorded: WatchedRig, plan: StepPlan) -> None:
    """Run a step on both rigs and compare hidden states and sampled tokens bitwise."""
    assert eager.collect(plan) == recorded.collect(plan)
    assert torch.equal(eager.hidden.view(torch.uint8), recorded.hidden.view(torch.uint8))


def run_random_plans(
    model: PagedCausalLM, hosts: Sequence[HostAdapter], seed: int = 28, steps: int = 40, sampling: bool = True
) -> WatchedRig:
    eager, recorded = make_pair(model, hosts)
    for plan in RandomPlans(len(hosts), seed, sampling=sampling).plans(steps):
        check_step(eager, recorded, plan)
        recorded.longest = max([recorded.longest, *(plan.starts + plan.counts)])
    return recorded


def make_mixed_host_adapters(model: PagedCausalLM) -> list[HostAdapter]:
    """Prepare adapters with DoRA magnitudes, biases, embedding rows, trained tokens, norm weights and output scales."""
    targets, vocab_size = collect_adapter_targets(model), model.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    linears = {name: factors for name, factors in random_factors(targets, 4, 1).items() if "head" not in name}
    dora = {name: ModuleWeights(a, b, 0.3, magnitude=draw(len(b))) for name, (a, b) in linears.items()}
    biased = {name: ModuleWeights(a, b, 0.3, lora_bias=draw(len(b))) for name, (a, b) in linears.items()}
    rows: dict[str, ModuleWeights] = {}
    for name, target in targets.items():
        if target.kind is TargetKind.EMBEDDING:
            a, b = draw(2, target.inputs.full), draw(target.outputs.full, 2)
            rows[name] = ModuleWeights(a, b, 0.1, token_ids=(5, 9), token_rows=draw(2, target.outputs.full))
        elif target.kind is TargetKind.HEAD:
            rows[name] = ModuleWeights(token_ids=(5, 9), token_rows=draw(2, target.inputs.full))
    scaled = {
        name: ModuleWeights(weight=draw(target.outputs.full))
        if target.kind is TargetKind.NORM and target.weight is not None
        else ModuleWeights(output_scale=draw(target.outputs.full))
        for name, target in targets.items()
    }
    given = [GivenAdapter(modules, vocab_size) for modules in (dora, biased, rows, scaled)]
    return [prepare(adapter, targets, torch.float32, FakeGroup()) for adapter in given]


@pytest.mark.parametrize("name", slow_except(QUICK, sorted({*VARIANTS} - {UNRECORDED})))
def test_cpu_graphs_match_eager_steps_bitwise(name: str) -> None:
    """Sequences join and leave, adapters are loaded and unloaded, and sequences reach the maximum length.

    All rows are greedy, because sampling is not part of the graph.
    """
    model = make_model(name, CPU)
    recorded = run_random_plans(model, make_host_adapters(model), seed=125, steps=32, sampling=False)
    assert len(recorded.kinds) > 3
    assert {kind.has_adapters for kind in recorded.kinds} == {False, True}
    assert recorded.longest == MAX_LENGTH - 1, "sequences stop at this length"


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "opt-projection", "neox-parallel", "qwen3-window"])
def test_cpu_graphs_match_eager_steps_with_all_adapter_methods(name: str) -> None:
    model = make_model(name, CPU)
    assert run_random_plans(model, [*make_mixed_host_adapters(model), *make_host_adapters(model)[:2]], steps=60).kinds


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_cpu_graphs_without_adapter_memory_match_eager_steps(name: str) -> None:
    assert len(run_random_plans(make_model(name, CPU), [], seed=14).kinds) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_cpu_graphs_match_eager_steps(dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    tensors = {name: tensor * 10 for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    weights = Weights(tensors, device=CPU, dtype=dtype, process_group=FakeGroup(), ops=select_ops(CPU))
    model = FlashLlamaForCausalLM("", config, weights)
    assert len(run_random_plans(model, make_host_adapters(model)).kinds) > 3


# --- Changes between steps --------------------------------------------------------------------------------------------


class TwoSequencePlans:
    """Plans for two sequences whose blocks are added one at a time, as in the engine."""

    def __init__(self) -> None:
        self._step = 0
        self._lengths = np.zeros(2, np.int64)
        self._next_block = 0

    def plan(self, adapters: Sequence[int], ops: Sequence[Any] = ()) -> StepPlan:
        self._step += 1
        new: tuple[NewSequence, ...] = ()
        blocks = []
        counts = np.ones(2, np.int64)
        if self._step == 1:
            new = tuple(NewSequence(row, [7, 8, 9], 3, SamplingParams(), StopParams()) for row in (0, 1))
            counts = np.full(2, 3)
        starts = self._lengths.copy()
        self._lengths += counts
        for row in (0, 1):
            for column in range(-(-int(starts[row]) // BLOCK_SIZE), -(-int(self._lengths[row]) // BLOCK_SIZE)):
                blocks.append([row, column, self._next_block])
                self._next_block += 1
        return StepPlan(
            self._step,
            np.array([0, 1]),
            starts,
            counts,
            np.ones(2, bool),
            np.zeros(2, bool),
            np.array(adapters),
            new,
            np.array(blocks, np.int64).reshape(-1, 3),
            tuple(ops),
        )


def test_cpu_graphs_match_eager_steps_up_to_max_length() -> None:
    model = make_model("llama-gqa", CPU)
    eager, recorded = make_pair(model, [])
    duet = TwoSequencePlans()
    for _ in range(MAX_LENGTH - 2):
        check_step(eager, recorded, duet.plan([0, 0]))
    assert recorded.kinds == {GraphKey(2)}


def test_cpu_graphs_follow_adapter_moves_and_replacements() -> None:
    model = make_model("llama-gqa", CPU)
    hosts = make_host_adapters(model)
    eager, recorded = make_pair(model, hosts)
    duet, places = TwoSequencePlans(), {}
    check_step(eager, recorded, duet.plan([1, 2], [LoadOp("0", 1, 0), LoadOp("1", 2, 0)]))
    for adapters in ([1, 2], [1, 2], [0, 2], [2, 2], [0, 0], [1, 2]):
        check_step(eager, recorded, duet.plan(adapters))
    for rig in (eager, recorded):
        assert rig._memory is not None
        source = 2 * rig._units
        rig._memory.move(2, source, source - 3)
        places[rig] = source
    check_step(eager, recorded, duet.plan([1, 2], [MoveOp(2, source, source - 3)]))
    for rig in (eager, recorded):
        assert rig._memory is not None
        rig._memory.unload(1)
    check_step(eager, recorded, duet.plan([1, 2], [LoadOp("3", 1, 0)]))
    check_step(eager, recorded, duet.plan([1, 2]))
    assert recorded.kinds == {GraphKey(2), GraphKey(2, has_adapters=True)}


def test_cpu_graphs_match_eager_steps_after_rotary_table_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "INITIAL_TABLE_ROWS", 8)
    eager, recorded = make_pair(make_model("llama-gqa", CPU), [])
    rows = recorded.graphs._rotary_capacity
    recorded.graphs._model = make_model("llama-gqa", CPU)  # with separate tables
    duet = TwoSequencePlans()
    for _ in range(MAX_LENGTH - 2):
        check_step(eager, recorded, duet.plan([0, 0]))
    assert rows == 8
    assert recorded.graphs._rotary_capacity == 32


def make_two_sequence_plan(
    step: int, starts: Sequence[int], counts: Sequence[int], ops: Sequence[Any] = (), samples: bool = False
) -> StepPlan:
    """Plan a step for two sequences with prompts of three tokens and known completions."""
    new = tuple(NewSequence(row, [7 + row, *range(5, 18)], 3, SamplingParams(), StopParams()) for row in (0, 1))
    width = -(-MAX_LENGTH // BLOCK_SIZE)
    blocks = [[row, column, row * width + column] for row in (0, 1) for column in range(width)]
    return StepPlan(
        step,
        np.array([0, 1]),
        np.array(starts),
        np.array(counts),
        np.full(2, samples),
        np.zeros(2, bool),
        np.array([1, 2]),
        new if step == 1 else (),
        np.array(blocks if step == 1 else [], np.int64).reshape(-1, 3),
        tuple(ops),
    )


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "qwen3-window"])
def test_forced_tokens_match_single_steps_bitwise(name: str) -> None:
    model = make_model(name, CPU)
    hosts, ops = make_host_adapters(model), [LoadOp("0", 1, 0), LoadOp("1", 2, 0)]
    walking, jumping = (WatchedRig(model, hosts, graph_sizes=SIZES) for _ in range(2))
    for rig in (walking, jumping):
        rig.collect(make_two_sequence_plan(1, [0, 0], [3, 3], ops))
    walked = list[torch.Tensor]()
    for step in range(5):
        walking.collect(make_two_sequence_plan(2 + step, [3 + step, 3 + step], [1, 1]))
        walked.append(walking.hidden)
    jumping.collect(make_two_sequence_plan(2, [3, 3], [5, 2]))
    expected = torch.cat([*(hidden[:1] for hidden in walked), *(hidden[1:] for hidden in walked[:2])])
    assert torch.equal(jumping.hidden.view(torch.uint8), expected.view(torch.uint8))
    assert jumping.kinds == {GraphKey(7, has_adapters=True)}


def test_forced_tokens_are_not_split_without_graphs() -> None:
    model = make_model(UNRECORDED, CPU)
    rig, eager = WatchedRig(model, [], graph_sizes=SIZES), WatchedRig(model, [])
    for plan in (
        make_two_sequence_plan(1, [0, 0], [3, 3]),
        make_two_sequence_plan(2, [3, 3], [1, 1]),
        make_two_sequence_plan(3, [4, 4], [5, 2]),
    ):
        check_step(eager, rig, replace(plan, adapter_indices=np.zeros(2, np.int64)))
    assert not rig.kinds
    assert rig.runner._layout is not None
    assert rig.runner._layout.counts == [5, 2]


# --- Availability and memory of CPU graphs ----------------------------------------------------------------------------


def test_unrecordable_model_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(UNRECORDED, CPU)
    with caplog.at_level(logging.INFO):
        assert not run_random_plans(model, make_host_adapters(model)).kinds
    assert [record.message for record in caplog.records if "without CPU graphs" in record.message]


def test_cpu_graphs_need_one_rank_and_recordable_ops() -> None:
    model = make_model("llama-gqa", CPU)
    two: Any = SimpleNamespace(size=lambda: 2)
    assert uses_cpu_graphs(model, FakeGroup())
    assert not uses_cpu_graphs(model, two)
    assert not uses_cpu_graphs(make_model(UNRECORDED, CPU), FakeGroup())
    model.ops = reference
    assert not uses_cpu_graphs(model, FakeGroup())


def test_cpu_graphs_cover_all_small_decode_batches() -> None:
    assert list(GraphSizes.choose_for_cpu().decode) == list(range(1, MAX_CPU_GRAPH_TOKENS + 1))
    assert not GraphSizes.choose_for_cpu().mixed


@torch.inference_mode()
def test_graphs_share_memory_of_largest_graph() -> None:
    model = make_model("llama-gqa", CPU)
    rig = WatchedRig(model, make_host_adapters(model), graph_sizes=GraphSizes.choose_for_cpu(), max_num_seqs=64)
    graphs, taken = rig.graphs, set()
    recorder: Any = graphs._recorder
    for size in (1, 64, 17, 2):
        for has_adapters in (False, True):
            assert graphs._record(GraphKey(size, has_adapters=has_adapters))
            taken.add(recorder.buffers.num_bytes)
    widest = 4 * max(model.config.intermediate_size, 4 * model.config.hidden_size)
    assert len(taken) == 1
    assert max(taken) < 64 * 5 * widest
