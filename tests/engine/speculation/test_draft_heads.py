"""Medusa heads guess tokens, and completions stay the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server import build
from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.llm import LLM
from lorax_server.models.draft_heads import DraftHeads, load_draft_heads
from lorax_server.models.registry import get_model
from lorax_server.types import SamplingParams, StopParams
from tests.engine.speculation.medusa import HIDDEN_SIZE, Tensors, make_heads, run_heads, train_heads, write_heads
from tests.engine.speculation.requests import ADAPTERS, MODEL, make_prompt, make_requests
from tests.engine.speculation.test_lossless import SETTINGS, check_equal, generate
from tests.ranks import RankPool

STOP = StopParams(max_new_tokens=40, ignore_eos=True)
PLAIN: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "cache_bytes": 2**25}


def guess(group: ProcessGroup, folder: Path, hidden: torch.Tensor) -> list[list[int]]:
    """Return the guesses of the heads in a folder, on one rank."""
    model = get_model(ModelConfig(MODEL, dtype="float32"), group)
    placement: Any = {"device": model.device, "dtype": model.dtype, "process_group": group, "ops": model.ops}
    heads = load_draft_heads(folder, model.lm_head, **placement)
    with torch.inference_mode():
        guesses: list[list[int]] = heads(hidden, model.lm_head).tolist()
    return guesses


def load_lm_head() -> torch.Tensor:
    model = get_model(ModelConfig(MODEL, dtype="float32"), FakeGroup())
    (target,) = model.lm_head.targets
    return target.read().float()


@pytest.mark.parametrize("count", [1, 5, 70])  # 70 rows need several products with the LM head
@pytest.mark.parametrize(("num_blocks", "has_lm_heads"), [(1, False), (1, True), (3, True), (2, False)])
def test_guesses_match_definition(num_blocks: int, has_lm_heads: bool, count: int, tmp_path: Path) -> None:
    tensors = make_heads(3, num_blocks, has_lm_heads=has_lm_heads)
    folder = write_heads(tmp_path, tensors, 3, num_blocks)
    hidden = torch.randn(count, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    expected = run_heads(tensors, hidden, load_lm_head()).argmax(-1).t()
    assert guess(FakeGroup(), folder, hidden) == expected.tolist()


def test_all_ranks_guess_the_same(tmp_path: Path, ranks: RankPool) -> None:
    folder = write_heads(tmp_path, make_heads(2), 2)
    hidden = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    expected = guess(FakeGroup(), folder, hidden)
    assert ranks.run(2, guess, folder, hidden) == [expected, expected]


@pytest.mark.usefixtures("equal_step_times")
@pytest.mark.parametrize(
    ("device", "max_steps_in_flight"), [("cpu", 1), ("cpu", 2), pytest.param("cuda", 2, marks=pytest.mark.gpu)]
)
def test_correct_guesses_save_steps(device: str, max_steps_in_flight: int, tmp_path: Path) -> None:
    """The heads are trained on two completions, so almost all their guesses are correct. During the first completion,
    the drafter measures step times.
    """
    prompts = [make_prompt(request.prompt) for request in make_requests(2, 11)]
    settings = PLAIN | {"device": device, "dtype": "float32"}
    with LLM(MODEL, **settings) as llm:
        expected = llm.generate(prompts, SamplingParams(), STOP)
    texts = [[*completion.prompt_ids, *completion.token_ids] for completion in expected]
    folder = write_heads(tmp_path, train_heads(texts, 3, 60), 3)
    settings |= {"speculative_tokens": 3, "max_steps_in_flight": max_steps_in_flight}
    with LLM(MODEL, draft_heads=folder, **settings) as llm:
        (first,) = llm.generate(prompts[0], SamplingParams(), STOP)
        before = llm.status
        (second,) = llm.generate(prompts[1], SamplingParams(), STOP)
        after = llm.status
    assert [first.token_ids, second.token_ids] == [completion.token_ids for completion in expected]
    assert after.steps - before.steps < STOP.max_new_tokens / 2
    num_drafted = after.drafted_tokens - before.drafted_tokens
    assert after.accepted_tokens - before.accepted_tokens > 0.9 * num_drafted


@pytest.mark.slow
@pytest.mark.usefixtures("equal_step_times")
def test_completions_are_equal_with_heads(tmp_path: Path) -> None:
    """Requests have structures, penalties, stop strings and adapters, and are preempted."""
    requests = make_requests(40, 12)
    folder = write_heads(tmp_path, make_heads(3), 3)
    expected, _ = generate(requests, speculative_tokens=0)
    for max_steps_in_flight in (1, 2):
        settings = {"draft_heads": folder, "max_steps_in_flight": max_steps_in_flight}
        actual, status = generate(requests, speculative_tokens=6, **settings)
        check_equal(actual, expected, requests)
        assert status.drafted_tokens > 0


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def change_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = make_heads(2)
        change(tensors)
        write_heads(folder, tensors, 2)

    return write


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "cannot be used as a config of Medusa heads: .*No such file"),
    "invalid JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be used as a config"),
    "deep JSON": (lambda folder: (folder / "config.json").write_text("[" * 10**6), "cannot be used as a config"),
    "JSON list": (lambda folder: (folder / "config.json").write_text("[]"), "cannot be used as a config"),
    "no number": (change_config(medusa_num_heads=None), r"medusa_num_heads must be an integer from 1 to 16 \(got None"),
    "zero heads": (change_config(medusa_num_heads=0), "medusa_num_heads must be"),
    "huge number": (change_config(medusa_num_heads=10**9), "medusa_num_heads must be"),
    "text": (change_config(medusa_num_layers="1"), "medusa_num_layers must be an integer"),
    "no weights": (
        lambda folder: (folder / "medusa_lm_head.safetensors").unlink(),
        "has no medusa_lm_head.safetensors",
    ),
    "garbage": (lambda folder: (folder / "medusa_lm_head.safetensors").write_bytes(b"x" * 99), "safetensors"),
    "missing head": (change_config(medusa_num_heads=3), "2.0.linear.weight"),
    "extra head": (change_config(medusa_num_heads=1), "tensor '1.0.linear.bias' does not belong to 1 heads with 1 bl"),
    "other name": (change_tensors(lambda x: x.update({"x": torch.zeros(1)})), "tensor 'x' does not belong"),
    "other size": (
        change_tensors(lambda x: x.update({"0.0.linear.weight": torch.zeros(8, 8)})),
        r"'0.0.linear.weight'.*8, 8",
    ),
    "one LM head": (
        change_tensors(lambda x: x.update({"0.1.weight": torch.zeros(2048, HIDDEN_SIZE)})),
        "only 1 of 2 heads have their own LM head",
    ),
    "small LM heads": (
        change_tensors(lambda x: x.update({f"{head}.1.weight": torch.zeros(99, HIDDEN_SIZE) for head in (0, 1)})),
        "'0.1.weight'.*99",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_heads_are_rejected(case: str, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "heads", make_heads(2), 2)
    change, message = BAD_FOLDERS[case]
    change(folder)
    with pytest.raises(LoraxError, match=message):
        guess(FakeGroup(), folder, torch.zeros(1, HIDDEN_SIZE))


def test_heads_that_do_not_fit_into_memory_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DraftHeads, "__init__", run_out_of_memory)
    with pytest.raises(ConfigError, match="GPU memory is not sufficient for the draft heads"):
        guess(FakeGroup(), write_heads(tmp_path, make_heads(1), 1), torch.zeros(1, HIDDEN_SIZE))


def test_heads_enable_speculation(tmp_path: Path) -> None:
    folder = write_heads(tmp_path, make_heads(2), 2)
    with LLM(MODEL, draft_heads=str(folder), **PLAIN) as llm:
        llm.generate([5, 6], stop=STOP)
        assert llm.status.drafted_tokens > 0


def test_heads_run_only_for_possible_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with more than `speculation_max_batch_size` sequences, or without speculation, do not run the heads."""
    folder = write_heads(tmp_path, make_heads(2), 2)
    sizes: list[int] = []

    def run(_: DraftHeads, hidden: torch.Tensor, __: MultiAdapterHead) -> torch.Tensor:
        sizes.append(len(hidden))
        return torch.zeros(len(hidden), 2, dtype=torch.long)

    monkeypatch.setattr(DraftHeads, "forward", run)
    settings = SETTINGS | {"cache_tokens": 4000, "draft_heads": folder, "speculative_tokens": 2}
    with LLM(MODEL, ADAPTERS, **settings, speculation_max_batch_size=1) as llm:
        llm.generate([[5, 6], [5, 7]], stop=StopParams(max_new_tokens=6, ignore_eos=True))
        assert build.warm_up(llm._engine) > 0
        assert not sizes
        llm.generate([5, 6], stop=StopParams(max_new_tokens=6, ignore_eos=True))
        assert sizes
