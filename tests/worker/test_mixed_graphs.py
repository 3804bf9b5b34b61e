"""Mixed steps (prefill and decode) with static padded inputs match steps with new inputs. On a GPU, graphs match eager
launches."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lorax_server.adapters.host import HostAdapter
from lorax_server.kernels import Field
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import AdapterOp, LoadOp, NewSequence, StepPlan, StepResult, UnloadOp
from lorax_server.types import SamplingParams, StopParams
from lorax_server.worker.graphs import DECODE_GRAPH_SIZES, MIXED_GRAPH_SIZES, GraphSizes, StepGraphs
from lorax_server.worker.inputs import build_step_tokens
from tests.grids import slow_except
from tests.parity.adapters.served import make_model
from tests.worker.test_graphs import (
    CPU,
    NAMES,
    Rig,
    close_rigs,  # noqa: F401 - a fixture
    gpu_model,
    half_model,
    make_host_adapters,
)
from tests.worker.test_inputs import make_plan


def test_mixed_graph_sizes_end_with_largest_step() -> None:
    assert GraphSizes.choose(6, 8) == ([1, 2, 4, 6], [8])
    assert GraphSizes.choose(4, 100).mixed == [16, 32, 64, 96, 100]
    assert GraphSizes.choose(4, 4096).mixed == list(MIXED_GRAPH_SIZES)
    assert GraphSizes.choose(4, 600).mixed == [16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 600]


Check = Callable[[StepResult, StepResult, str], None]  # the string names the step


@dataclass
class Running:
    """A running sequence: prompt tokens and the number of computed tokens."""

    slot: int
    adapter: int
    prompt: list[int]
    computed: int = 0


@dataclass
class Traffic:
    """Creates plans of up to `most` tokens, with prompt chunks of any length and decoding sequences.

    Sequences and adapters join and leave. Index `i` holds host adapter `(i + shift) % number`.
    """

    max_num_seqs: int
    max_length: int
    block_size: int
    most: int
    num_hosts: int
    seed: int
    leave: float = 0.04  # probability that a sequence is canceled
    vocab_size: int = 90
    step: int = 0
    running: list[Running] = field(default_factory=list)
    loaded: dict[int, int] = field(default_factory=dict)  # adapter number at each index

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def plan(self) -> StepPlan:
        self.step += 1
        draw = self.draw
        self.running = [s for s in self.running if s.computed < self.max_length - 2 and draw.random() > self.leave]
        ops = self.change_adapters()
        new, blocks = self.join()
        order = sorted(self.running, key=lambda each: each.adapter)
        counts = self.assign_tokens(order)
        order = [each for each in order if counts.get(each.slot)]
        plan = StepPlan(
            self.step,
            np.array([each.slot for each in order], np.int64),
            np.array([each.computed for each in order], np.int64),
            np.array([counts[each.slot] for each in order], np.int64),
            np.array([each.computed + counts[each.slot] >= len(each.prompt) for each in order], bool),
            np.zeros(len(order), bool),
            np.array([each.adapter for each in order], np.int64),
            tuple(new),
            np.array(blocks, np.int64).reshape(-1, 3),
            tuple(ops),
        )
        for each in order:
            each.computed += counts[each.slot]
        return plan

    def assign_tokens(self, order: Sequence[Running]) -> dict[int, int]:
        """Assign one token to each decoding sequence and the remaining tokens to prompt chunks."""
        counts = {each.slot: 1 for each in order if each.computed >= len(each.prompt)}
        left = self.draw.randint(0, self.most) - len(counts)
        for each in order:
            if each.slot not in counts and left > 0:
                rest = len(each.prompt) - each.computed
                counts[each.slot] = min(rest if self.draw.random() < 0.7 else self.draw.randint(1, rest), left)
                left -= counts[each.slot]
        return counts

    def join(self) -> tuple[list[NewSequence], list[list[int]]]:
        new, blocks, draw = [], [], self.draw
        width = -(-self.max_length // self.block_size)
        for slot in sorted(set(range(self.max_num_seqs)) - {each.slot for each in self.running}):
            if draw.random() < 0.7:
                continue
            longest = draw.choice([2, 3, 8, self.max_length - 2])
            prompt = [draw.randrange(3, self.vocab_size) for _ in range(draw.randint(1, longest))]
            options: dict[str, Any] = {}
            if draw.random() < 0.3:
                options = {"do_sample": True, "seed": draw.randrange(1000), "temperature": 0.8, "top_k": 20}
            new.append(NewSequence(slot, prompt, len(prompt), SamplingParams(**options), StopParams()))
            blocks += [[slot, column, slot * width + column] for column in range(width)]
            self.running.append(Running(slot, draw.choice([0, *self.loaded]), prompt))
        return new, blocks

    def change_adapters(self) -> list[AdapterOp]:
        ops: list[AdapterOp] = []
        used = {each.adapter for each in self.running}
        for index in [index for index in self.loaded if index not in used and self.draw.random() < 0.3]:
            del self.loaded[index]
            ops.append(UnloadOp(index))
        absent = [number for number in range(self.num_hosts) if number not in self.loaded.values()]
        if absent and self.draw.random() < 0.5:
            index = min(set(range(1, self.num_hosts + 1)) - set(self.loaded))
            self.loaded[index] = self.draw.choice(absent)
            ops.append(LoadOp(str(self.loaded[index]), index, 0))
        return ops


def check_traffic(traffic: Traffic, rigs: tuple[Rig, Rig], steps: int, check: Check) -> set[int]:
    """Run the same plans on two runners. Return the sizes of mixed steps that used a graph in the second runner."""
    graphs, sizes = rigs[1].runner._graphs, set()
    assert graphs is not None
    for _ in range(steps):
        plan = traffic.plan()
        kind, first, second = None, *(rig.collect(plan) for rig in rigs)
        if len(plan.slots) and not (tokens := build_step_tokens(plan)).is_single:
            kind = graphs.find(tokens, rigs[1].runner._make_adapter_data(plan.adapter_indices, plan.counts))
            sizes |= {kind.size} if kind is not None else set()
        note = (
            f"step {traffic.step}, {kind}, {plan.counts} tokens, of adapters {plan.adapter_indices}: {traffic.loaded}"
        )
        check(first, second, note)
    return sizes


def is_close(first: StepResult, second: StepResult, note: str) -> None:
    assert first.token_ids == second.token_ids, note
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=2e-4, err_msg=note)


def is_near(first: StepResult, second: StepResult, note: str) -> None:
    """Compare with a tolerance for other tile sizes: tensor cores round operands to 11 bits."""
    assert first.token_ids == second.token_ids, note
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=5e-3, err_msg=note)


def is_same(first: StepResult, second: StepResult, note: str) -> None:
    pairs = zip(first.logprobs, second.logprobs, strict=True)
    assert [slot for slot, (one, other) in enumerate(pairs) if one != other] == [], note
    assert first.token_ids == second.token_ids, note


def make_rigs(
    model: PagedCausalLM, hosts: list[HostAdapter], options: dict[str, Any], *padded: dict[str, Any]
) -> tuple[Rig, Rig]:
    first, second = (Rig(model, hosts, **options, **more) for more in padded)
    return first, second


SMALL: dict[str, Any] = {"max_num_seqs": 7, "max_length": 30, "block_size": 4}


@pytest.mark.parametrize("name", slow_except(["llama-gqa", "gpt2"], NAMES))
def test_padded_inputs_match_unpadded_tokens(name: str) -> None:
    model, sizes = make_model(name, CPU), (12, 24)
    hosts = make_host_adapters(model)
    rigs = make_rigs(model, hosts, SMALL, {}, {"graph_sizes": GraphSizes([1, 4], sizes), "capture": False})
    traffic = Traffic(**SMALL, most=30, num_hosts=len(hosts), seed=len(name))
    assert check_traffic(traffic, rigs, 50, is_close) == set(sizes)


def test_padded_inputs_without_adapters_match_unpadded_tokens() -> None:
    model, sizes = make_model("llama-gqa", CPU), (6, 20)
    rigs = make_rigs(model, [], SMALL, {}, {"graph_sizes": GraphSizes([1, 4], sizes), "capture": False})
    assert check_traffic(Traffic(**SMALL, most=24, num_hosts=0, seed=5), rigs, 40, is_close) == set(sizes)


@pytest.mark.parametrize("size", [16, 32, 96, 192, 256, 320, 640, 1280])
def test_padded_inputs_of_all_sizes_match_unpadded_tokens(size: int) -> None:
    shape: dict[str, Any] = {"max_num_seqs": 24, "max_length": 64, "block_size": 8}
    model = make_model("qwen3-window", CPU)
    hosts = make_host_adapters(model)
    rigs = make_rigs(model, hosts, shape, {}, {"graph_sizes": GraphSizes(DECODE_GRAPH_SIZES, [size]), "capture": False})
    assert check_traffic(Traffic(**shape, most=size, num_hosts=len(hosts), seed=size), rigs, 12, is_close) == {size}


def test_padding_tokens_write_no_kv_slots() -> None:
    rig = Rig(make_model("llama-gqa", CPU), [], graph_sizes=GraphSizes([4], [16]), capture=False)
    new = tuple(NewSequence(slot, [5, 6, 7, 8], 4, SamplingParams(), StopParams()) for slot in (2, 5))
    blocks = np.array([[2, 0, 9], [2, 1, 8], [5, 0, 7]], np.int64)
    rig.run(make_plan([2, 5], [0, 1], [4, 3], new_sequences=new, new_blocks=blocks))
    assert rig.runner._graphs is not None
    inputs = rig.runner._graphs._inputs
    assert inputs.input_lengths.tolist() == [4, 3, *[0] * 14]
    assert inputs.cache_lengths.tolist() == [0, 1, *[0] * 14]
    assert inputs.cu_seqlens.tolist() == [0, 4, *[7] * 15]
    assert inputs.kv_slots.tolist() == [36, 37, 38, 39, 29, 30, 31, *[-1] * 9]
    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 1, 2, 3, *[0] * 9]
    assert inputs.prompt_lengths.tolist() == [4] * 7 + [0] * 9
    assert inputs.adapter_indices.tolist() == [0] * 16


def test_larger_steps_have_no_graph() -> None:
    rig = Rig(make_model("llama-gqa", CPU), [], graph_sizes=GraphSizes([1], [4]), capture=False)
    graphs = rig.runner._graphs
    assert isinstance(graphs, StepGraphs)
    graphs.run = None  # type: ignore[assignment, method-assign] # a call would fail
    new = tuple(NewSequence(slot, [5, 6, 7], 3, SamplingParams(), StopParams()) for slot in (0, 1))
    blocks = np.array([[0, 0, 0], [1, 0, 1]], np.int64)
    rig.run(make_plan([0, 1], [0, 0], [3, 3], new_sequences=new, new_blocks=blocks))


# --- On a GPU ---------------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = {"max_num_seqs": 40, "max_length": 400, "block_size": 16}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_mixed_graphs_match_eager_tokens(name: str) -> None:
    model = gpu_model(name)
    hosts, sizes = make_host_adapters(model), (12, 24)
    options = {"graph_sizes": GraphSizes([1, 4], sizes)}
    rigs = make_rigs(model, hosts, SMALL, {}, options)
    traffic = Traffic(**SMALL, most=30, num_hosts=len(hosts), seed=len(name))
    assert check_traffic(traffic, rigs, 60, is_close) == set(sizes)


def check_all_sizes(
    model: PagedCausalLM,
    hosts: list[HostAdapter],
    sizes: Sequence[int],
    others: dict[str, Any],
    check: Check,
) -> set[int]:
    """Compare graphs of these sizes, captured without adapters and prompts, with an eager runner."""
    options = {"graph_sizes": GraphSizes([4, 16, LARGE["max_num_seqs"]], sizes)}
    rigs = make_rigs(model, hosts, LARGE, options | others, options)
    traffic = Traffic(**LARGE, most=0, num_hosts=len(hosts), seed=len(hosts))
    result = set()
    for most, leave in ((16, 0.2), (40, 0.1), (130, 0.1), (300, 0.2), (1100, 0.5)):
        traffic.most, traffic.leave = most, leave
        result |= check_traffic(traffic, rigs, 40, check)
    return result


HALF = pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"), [(torch.bfloat16, (8, 2), 128), (torch.float16, (4, 4), 64)], ids=str
)


@pytest.mark.gpu
@HALF
@pytest.mark.parametrize("with_adapters", [False, True])
def test_mixed_graphs_match_eager_launches_bitwise(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, with_adapters: bool
) -> None:
    """All adapters target all modules here, because a large step launches linears without LoRA differently."""
    model = half_model(dtype, heads, head_dim)
    hosts = make_host_adapters(model)[:3] if with_adapters else []
    result = check_all_sizes(model, hosts, MIXED_GRAPH_SIZES, {"capture": False}, is_same)
    assert result > {size for size in MIXED_GRAPH_SIZES if size <= 256}
    assert len(result) >= 13


@pytest.mark.gpu
@HALF
def test_small_mixed_graphs_match_eager_with_any_adapters(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    model, sizes = half_model(dtype, heads, head_dim), [size for size in MIXED_GRAPH_SIZES if size <= 256]
    assert check_all_sizes(model, make_host_adapters(model), sizes, {"capture": False}, is_same) == set(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("most_rank", [64, 512])
def test_graphs_of_all_sizes_match_eager_tokens(most_rank: int) -> None:
    """Large steps with an adapter rank above 64 have no graph."""
    model = half_model(torch.float32, (8, 2), 64)
    hosts = [host for host in make_host_adapters(model) if int(host.table[:, Field.RANK].max()) <= most_rank]
    result = check_all_sizes(model, hosts, MIXED_GRAPH_SIZES, {"graph_sizes": None}, is_near)
    assert result > {size for size in MIXED_GRAPH_SIZES if size <= 256}


@pytest.mark.gpu
@pytest.mark.parametrize("count", [7, 15, 50])
def test_decode_is_bitwise_equal_with_prompts_in_batch(count: int) -> None:
    """Uses sizes for which linear layers sum in the same order."""
    model = half_model(torch.bfloat16, (8, 2), 128)
    sizes = (8, 16, 64)
    shape: dict[str, Any] = {"max_num_seqs": 64, "max_length": 64, "block_size": 16}
    alone, beside = make_rigs(model, [], shape, *[{"graph_sizes": GraphSizes(sizes, sizes)}] * 2)
    decoding = count - 3  # so that a prompt of three tokens fits into the same size
    prompts = tuple(NewSequence(slot, [slot + 3] * 20, 20, SamplingParams(), StopParams()) for slot in range(decoding))
    third = NewSequence(decoding, [9, 8, 7], 3, SamplingParams(), StopParams())
    blocks = np.array([[slot, column, slot * 4 + column] for slot in range(count) for column in range(4)], np.int64)

    slots, starts, ones = list(range(decoding)), [20] * decoding, [1] * decoding
    for rig in (alone, beside):
        rig.collect(make_plan(slots, [0] * decoding, starts, new_sequences=prompts, new_blocks=blocks))
    expected = alone.collect(make_plan(slots, starts, ones))
    actual = beside.collect(make_plan([*slots, decoding], [*starts, 0], [*ones, 3], new_sequences=(third,)))
    assert actual.token_ids[:-1] == expected.token_ids
    assert actual.logprobs[:-1] == expected.logprobs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("with_adapters", [False, True])
def test_mixed_step_does_not_synchronize_host(with_adapters: bool) -> None:
    model = gpu_model("llama-gqa")
    hosts = make_host_adapters(model) if with_adapters else []
    rig = Rig(model, hosts, **SMALL, graph_sizes=GraphSizes([8], [24]))
    traffic = Traffic(**SMALL, most=24, num_hosts=len(hosts), seed=3)
    for number in range(40):
        plan = traffic.plan()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number > 5 and not plan.adapter_ops else "default")
        try:
            ticket = rig.submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rig.runner.collect(ticket)
