"""KV blocks shared between adapters and the base model. PEFT is the reference.

Activated LoRA (aLoRA) adapters apply from their invocation tokens on. Other adapters apply to all tokens, but some do
not change keys and values.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.variants import calculate_alora_offsets

from lorax_server.errors import AdapterError, InputError
from lorax_server.llm import LLM
from lorax_server.structured_output.grammars import from_choices
from lorax_server.types import SamplingParams, StopParams
from tests.models.tiny import VOCAB
from tests.test_llm import SMALL, ReferenceModels, assert_idle, check_logprobs, generate_greedy, write_adapter

INVOCATION = [41, 42, 43]
STOP = StopParams(max_new_tokens=8, ignore_eos=True)
BLOCK = SMALL["block_size"]
DOCUMENT = [5 + 7 * i % 200 for i in range(61)]  # does not contain the invocation
ADAPTERS: dict[str, dict[str, Any]] = {
    "judge": {"alora_invocation_tokens": INVOCATION},
    "guard": {"alora_invocation_tokens": INVOCATION, "r": 2},
    "router": {"alora_invocation_tokens": [77], "use_rslora": True, "lora_bias": True},
    "plain": {},
}
LAST: dict[str, Any] = {"layers_to_transform": [1]}  # the tiny model has two layers
AFTER_KV: dict[str, dict[str, Any]] = {  # these adapters do not change keys and values
    "head": {"target_modules": ["lm_head"]},
    "last layer": {"target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], **LAST},
    "final norm": {"target_modules": ["down_proj"], **LAST, "modules_to_save": ["model.norm"]},
    "last layer, activated": {"target_modules": ["o_proj"], **LAST, "alora_invocation_tokens": INVOCATION},
}
CHANGES_KV: dict[str, dict[str, Any]] = {
    "last keys": {"target_modules": ["o_proj", "k_proj"], **LAST},
    "last values": {"target_modules": ["v_proj"], **LAST},
    "first output": {"target_modules": ["o_proj"], "layers_to_transform": [0]},
    "first MLP": {"target_modules": ["down_proj"], "layers_to_transform": [0]},
    "last input norm": {"target_modules": ["o_proj"], **LAST, "modules_to_save": ["layers.1.input_layernorm"]},
    "embedding": {"target_modules": ["embed_tokens"]},
}


class Served(ReferenceModels):
    """aLoRA adapters and one ordinary adapter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.adapters = {
            name: write_adapter(copy.deepcopy(self.base), self.root / name, seed, **settings)
            for seed, (name, settings) in enumerate((ADAPTERS | AFTER_KV | CHANGES_KV).items())
        }
        self.oracles = {name: self.load(path) for name, path in self.adapters.items()} | {None: self.base}

    def oracle(self, prompt: Sequence[int], adapter: str) -> Any:
        """Return PEFT's forward pass, activated as in `generate`: by the prompt, even if the completion matches too."""
        model = self.oracles[adapter]
        (offset,) = calculate_alora_offsets(model.peft_config, "default", torch.tensor([prompt]))

        def run(ids: torch.Tensor) -> Any:
            more = {"alora_offsets": [offset and offset + ids.shape[1] - len(prompt)]}
            return model(ids, **more if "alora_invocation_tokens" in ADAPTERS[adapter] else {})

        return run

    def tokens(self, prompt: Sequence[int], adapter: str | None) -> list[int]:
        return generate_greedy(self.oracles[adapter], self.tokenizer, list(prompt), STOP.max_new_tokens)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("alora"))


@pytest.fixture
def llm(served: Served) -> Iterator[LLM]:
    with LLM(served.model, served.adapters, **SMALL) as llm:
        yield llm
        assert_idle(llm)


def poison_cache(llm: LLM) -> None:
    """Overwrite all KV blocks with garbage."""
    for layer in llm._engine._executor._runner._kv_cache:  # type: ignore[attr-defined]
        for tensor in layer:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(3.0)


def count_reused(llm: LLM, prompt: Sequence[int], adapter: str | None) -> int:
    """Return how many prompt tokens of a request were found in the prefix cache."""
    before = llm.status.prefix_tokens
    llm.generate([list(prompt)], stop=StopParams(max_new_tokens=1), adapter=adapter)
    return llm.status.prefix_tokens - before


PROMPTS = {
    "at the start": [*INVOCATION, *DOCUMENT],
    "in the middle": [*DOCUMENT[:30], *INVOCATION, *DOCUMENT[30:]],
    "at the end": [*DOCUMENT, *INVOCATION],
    "several times": [*DOCUMENT[:9], *INVOCATION, *DOCUMENT[9:30], *INVOCATION, 9, 8],
    "missing": DOCUMENT,
    "incomplete": [*DOCUMENT, *INVOCATION[:2]],
    "shorter than the invocation": INVOCATION[:1],
    "only the invocation": INVOCATION,
    "one token before": [9, *INVOCATION],
    "other invocation": [*DOCUMENT[:21], 77, 6, 5, *INVOCATION, 4],
}


@pytest.mark.parametrize("where", PROMPTS)
def test_tokens_and_logprobs_match_peft(where: str, served: Served, llm: LLM) -> None:
    prompt = PROMPTS[where]
    for name in ADAPTERS:
        result = llm.generate([prompt], SamplingParams(num_alternatives=3), STOP, adapter=name, prompt_logprobs=True)
        assert result[0].token_ids == served.tokens(prompt, name)
        check_logprobs(served.oracle(prompt, name), [prompt], result)


def test_mixed_batch_matches_single_requests(served: Served, llm: LLM) -> None:
    """Chunked prefill, the prefix cache and preemption do not change the tokens."""
    names = [*ADAPTERS, None] * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS.values() for _ in (*ADAPTERS, None)]
    result = llm.generate(prompts, stop=STOP, adapter=names)
    for prompt, name, completion in zip(prompts, names, result, strict=True):
        assert completion.token_ids == served.tokens(prompt, name), (name, prompt)
    assert llm.status.prefix_tokens > 0


def test_preempted_sequences_continue_exactly(served: Served) -> None:
    prompt = PROMPTS["in the middle"][:40]
    with LLM(served.model, served.adapters, **SMALL | {"cache_bytes": None, "cache_tokens": 96}) as llm:
        llm.generate([[5], [5]], adapter=["judge", "guard"])  # load both adapters
        result = llm.generate([prompt, [6, *prompt], [7, *prompt]], stop=STOP, adapter=["judge", "guard", "judge"])
        assert llm.status.preemptions > 0
    assert [each.token_ids for each in result] == [
        served.tokens(each, name)
        for each, name in ((prompt, "judge"), ([6, *prompt], "guard"), ([7, *prompt], "judge"))
    ]


@pytest.mark.usefixtures("equal_step_times")
def test_speculation_does_not_change_tokens(served: Served) -> None:
    prompt, stop = PROMPTS["several times"] * 2, StopParams(max_new_tokens=30, ignore_eos=True)
    settings = SMALL | {"cache_bytes": 2**20}
    with LLM(served.model, served.adapters, **settings) as plain:
        expected = plain.generate([prompt] * 2, stop=stop, adapter=["judge", "plain"])
    with LLM(served.model, served.adapters, **settings, speculative_tokens=4) as drafting:
        for _ in range(2):
            actual = drafting.generate([prompt] * 2, stop=stop, adapter=["judge", "plain"])
            assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
        assert drafting.status.accepted_tokens > 0


def test_completion_that_contains_the_invocation_is_not_reactivated(served: Served, llm: LLM) -> None:
    """Only the prompt is searched, as in PEFT's `generate`."""
    bias = dict.fromkeys(INVOCATION, 50.0)
    for token_id in INVOCATION:
        (result,) = llm.generate([DOCUMENT], SamplingParams(logit_bias=bias | {token_id: 90.0}), STOP, adapter="judge")
        (base,) = llm.generate([DOCUMENT], SamplingParams(logit_bias=bias | {token_id: 90.0}), STOP)
        assert result.token_ids == base.token_ids
        assert result.logprobs == base.logprobs


def test_structured_output_matches_peft(served: Served, llm: LLM) -> None:
    """The choice is the letter with the highest logit in PEFT."""
    letters = "bcdfgjkmp"
    ids = [token_id for letter in letters for token_id in served.ids(letter)[-1:]]
    for prompt in (PROMPTS["in the middle"], PROMPTS["at the end"], PROMPTS["several times"]):
        logits = served.oracle(prompt, "judge")(torch.tensor([prompt])).logits[0, -1, ids]
        (result,) = llm.generate([prompt], adapter="judge", structure=from_choices([*letters]))
        assert result.text == letters[int(logits.argmax())]


# --- Prefix cache -----------------------------------------------------------------------------------------------------


def test_blocks_before_the_invocation_are_shared(llm: LLM) -> None:
    prompt = [*DOCUMENT, *INVOCATION, 9, 8]
    shared = len(DOCUMENT) // BLOCK * BLOCK
    own = (len(prompt) - 1) // BLOCK * BLOCK
    assert count_reused(llm, prompt, None) == 0
    assert count_reused(llm, prompt, "judge") == shared
    assert count_reused(llm, prompt, "guard") == shared
    assert count_reused(llm, prompt, "router") == own  # not invoked: all its blocks are the base model's
    assert count_reused(llm, prompt, "judge") == own
    assert count_reused(llm, prompt, "plain") == 0
    assert count_reused(llm, prompt, None) == own


def test_blocks_of_alora_prompts_serve_the_base_model(llm: LLM) -> None:
    prompt = [*DOCUMENT, *INVOCATION, 9, 8]
    assert count_reused(llm, prompt, "judge") == 0
    assert count_reused(llm, prompt, None) == len(DOCUMENT) // BLOCK * BLOCK


def test_only_shared_blocks_are_read(served: Served, llm: LLM) -> None:
    """Garbage in the base model's blocks reaches requests that share them, and no other request."""
    prompt = [*DOCUMENT, *INVOCATION]
    llm.generate([prompt], stop=STOP)
    poison_cache(llm)
    (plain,) = llm.generate([prompt], stop=STOP, adapter="plain")
    assert plain.token_ids == served.tokens(prompt, "plain")
    (judge,) = llm.generate([prompt], stop=STOP, adapter="judge")
    (exact,) = llm.generate([[6, *prompt]], stop=STOP, adapter="judge")  # shares nothing
    assert exact.token_ids == served.tokens([6, *prompt], "judge")
    assert judge.token_ids != served.tokens(prompt, "judge")


def test_block_depends_on_the_position_of_the_invocation(served: Served, llm: LLM) -> None:
    """Equal tokens in a block have different keys and values if the last invocation starts elsewhere in the block."""
    start = [*DOCUMENT[: 2 * BLOCK], 77, 5, 5, 77]  # the third block
    later = llm.generate([[*start, 5, 5, 5]], stop=STOP, adapter="router")  # invoked at the end of the third block
    assert later[0].token_ids == served.tokens([*start, 5, 5, 5], "router")
    (longer,) = llm.generate([[*start, 5, 77, 5]], stop=STOP, adapter="router")  # invoked in the fourth block
    assert longer.token_ids == served.tokens([*start, 5, 77, 5], "router")


def test_invocation_that_ends_in_the_next_block(served: Served, llm: LLM) -> None:
    """The blocks `41 42 43 41` are equal, but only the second prompt is invoked at their last token."""
    first, second = ([*DOCUMENT[: 2 * BLOCK], *INVOCATION, 41, *rest, 9, 9, 9] for rest in ([9, 9], [42, 43]))
    for prompt in (first, second, first):
        (result,) = llm.generate([prompt], stop=STOP, adapter="judge")
        assert result.token_ids == served.tokens(prompt, "judge")


@pytest.mark.parametrize("adapters", [("judge", "guard", None, "router", "plain"), ["last layer", "judge"]])
def test_one_prompt_for_several_adapters(adapters: Sequence[str | None], served: Served, llm: LLM) -> None:
    """The first sequence computes the shared blocks, and the others wait for them."""
    prompt = [*DOCUMENT, *INVOCATION]
    result = llm.generate([prompt], stop=STOP, adapter=adapters)
    assert [each.token_ids for each in result] == [served.tokens(prompt, name) for name in adapters]
    num_sharing = len([name for name in adapters if name != "plain"]) - 1
    assert llm.status.base_prefix_tokens >= num_sharing * (len(DOCUMENT) // 2)
    assert llm.status.adapter_prefix_tokens == 0


def test_one_text_for_several_adapters(served: Served, llm: LLM) -> None:
    result = llm.generate("hello", stop=STOP, adapter=["judge", None])
    assert [each.token_ids for each in result] == [served.tokens(served.ids("hello"), name) for name in ("judge", None)]
    prompts = ["hello"]
    assert len(llm.generate(prompts, stop=STOP, adapter=["judge", None])) == 2
    assert prompts == ["hello"]
    with pytest.raises(InputError, match="1 prompts, but 0 adapters"):
        llm.generate(prompts, adapter=[])


# --- Adapters that do not change keys and values ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*AFTER_KV, *CHANGES_KV])
def test_base_blocks_serve_adapters_that_do_not_change_kv(name: str, served: Served, llm: LLM) -> None:
    prompt = [*DOCUMENT, *INVOCATION]
    shared = (len(prompt) - 1) // BLOCK * BLOCK if name in AFTER_KV else 0
    assert count_reused(llm, prompt, None) == 0
    assert count_reused(llm, prompt, name) == shared
    (result,) = llm.generate([prompt], stop=STOP, adapter=name)
    assert result.token_ids == served.tokens(prompt, name)
    assert result.token_ids != served.tokens(prompt, None)
    assert count_reused(llm, [6, *prompt], name) == 0
    assert count_reused(llm, [6, *prompt], None) == (len(prompt) // BLOCK * BLOCK if name in AFTER_KV else 0)


@pytest.mark.parametrize("name", [*AFTER_KV, *CHANGES_KV])
def test_poisoned_base_blocks_reach_only_adapters_that_share_them(name: str, served: Served, llm: LLM) -> None:
    prompt = [*DOCUMENT, *INVOCATION]
    llm.generate([prompt], stop=STOP)
    poison_cache(llm)
    (result,) = llm.generate([prompt], SamplingParams(raw_logprobs=True), STOP, adapter=name)
    assert (result.token_ids == served.tokens(prompt, name)) == (name in CHANGES_KV)


# --- Rejected adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_alora_on_other_modules_is_rejected(settings: dict[str, Any], served: Served, tmp_path: Path) -> None:
    folder = write_adapter(
        copy.deepcopy(served.base), tmp_path / "other", 3, alora_invocation_tokens=INVOCATION, **settings
    )
    with LLM(served.model, {"other": folder}, **SMALL) as llm, pytest.raises(AdapterError, match=r"aLoRA|alora"):
        llm.generate("x", adapter="other")


def test_invocation_beyond_the_vocabulary_never_applies(served: Served, tmp_path: Path) -> None:
    tokens = [VOCAB + 5]
    folder = write_adapter(copy.deepcopy(served.base), tmp_path / "far", 3, alora_invocation_tokens=tokens)
    with LLM(served.model, {"far": folder}, **SMALL) as llm:
        (result,) = llm.generate([DOCUMENT], stop=STOP, adapter="far")
        assert result.token_ids == served.tokens(DOCUMENT, None)
        with pytest.raises(InputError, match="vocabulary"):
            llm.generate([[*DOCUMENT, *tokens]], stop=STOP, adapter="far")
