"""`LLM` on tiny models and adapters: the output matches transformers and PEFT."""

import copy
import gc
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from lorax_server.errors import AdapterError, AdapterNotFoundError, ConfigError, EngineError, InputError, LoraxError
from lorax_server.generation.generation import Completion, Generation
from lorax_server.llm import LLM
from lorax_server.model_types import MODEL_CLASSES
from lorax_server.text import adapter_tokenizers
from lorax_server.types import FinishReason, SamplingParams, StopParams
from tests.adapters.sources.test_source import Clock
from tests.grids import slow_except
from tests.lora import save_adapter
from tests.models.tiny import EOS_ID, SERVED, VOCAB, make_model, make_tokenizer, save

NEW_TOKENS = 12
STOP = StopParams(max_new_tokens=NEW_TOKENS)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
ADDED = [f"<added-{i}>" for i in range(25)]  # more than the rows of the base model's embedding that are not used
TIMEOUT_S = 120  # only reached if a test fails
TEXTS = ["the quick brown fox", "hello", "the lazy dog, and the world", "naïve 日本語 there"]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "block_size": 4,
    "max_step_tokens": 24,
    "cache_bytes": 2**18,
    "adapter_bytes": 2**19,
    "adapter_host_bytes": 2**24,
}


# --- Models and adapters ----------------------------------------------------------------------------------------------


def write_adapter(base: Any, folder: Path, seed: int, size: float = 0.2, **settings: Any) -> Path:
    """Write a LoRA adapter with random weights, saved by PEFT."""
    small: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    config = LoraConfig(**small | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT prints a warning
        model = get_peft_model(base, config)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, size)
        save_adapter(model, folder, save_embedding_layers=base.config.vocab_size != VOCAB)
    return folder


class ReferenceModels:
    """A model and adapters in folders, and the same model and adapters in transformers and PEFT."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = make_tokenizer()
        self.base = make_model(SERVED["llama"]())
        self.model = save(folder / "model", self.base, self.tokenizer)
        self.root = folder / "adapters"
        for seed, name in enumerate(("first", "second")):
            write_adapter(copy.deepcopy(self.base), self.root / name, seed)
        elsewhere = folder / "else where" / "third (copy)"
        write_adapter(copy.deepcopy(self.base), elsewhere, 7, r=2)
        self.adapters = {"first": self.root / "first", "second": self.root / "second", "the third": elsewhere}
        self.oracles = {name: self.load(path) for name, path in self.adapters.items()} | {None: self.base}

    def load(self, folder: Path, vocab_size: int = VOCAB) -> Any:
        base = copy.deepcopy(self.base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if vocab_size != VOCAB:
                base.resize_token_embeddings(vocab_size, mean_resizing=False)
            return PeftModel.from_pretrained(base, folder).eval()

    def ids(self, prompt: str | Sequence[int], tokenizer: Any = None) -> list[int]:
        return list((tokenizer or self.tokenizer)(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)

    def generate(self, prompt: str | Sequence[int], adapter: str | None = None) -> tuple[list[int], str]:
        return generate_greedy(self.oracles[adapter], self.tokenizer, self.ids(prompt))


@torch.no_grad()
def generate_greedy(model: Any, tokenizer: Any, ids: list[int], count: int = NEW_TOKENS) -> tuple[list[int], str]:
    """Return transformers' greedy tokens and their text."""
    done = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(done.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4, "rounding would decide"
    tokens = done.sequences[0, len(ids) :].tolist()
    before, after = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, [*ids, *tokens]))
    assert after.startswith(before)
    return tokens, after[len(before) :]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModels:
    return ReferenceModels(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def shared_llm(reference: ReferenceModels) -> Iterator[LLM]:
    with LLM(reference.model, reference.adapters, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Return the shared LLM, and check after each test that it is idle."""
    yield shared_llm
    assert_idle(shared_llm)


def assert_idle(llm: LLM) -> None:
    status = llm.status
    assert (status.running, status.waiting, status.waiting_for_adapters) == (0, 0, 0)
    assert status.free_blocks == status.num_blocks
    assert not llm._generations
    assert not llm._to_abort


def texts(completions: Sequence[Completion]) -> list[str]:
    return [completion.text for completion in completions]


@pytest.fixture
def during_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Return a function that schedules a callback in the middle of the n-th step from now."""

    def when(number: int, do: Callable[[], object]) -> None:
        executor = llm._engine._executor
        submit, count = executor.submit, itertools.count()

        def interfere(plan: Any) -> None:
            if next(count) == number:
                do()
            submit(plan)

        monkeypatch.setattr(executor, "submit", interfere)

    return when


# --- The same as transformers and PEFT --------------------------------------------------------------------------------


def test_cache_tokens_are_rounded_up_to_blocks(reference: ReferenceModels) -> None:
    settings = {name: value for name, value in SMALL.items() if name != "cache_bytes"}
    with LLM(reference.model, **settings | {"cache_tokens": 100, "block_size": 16}) as llm:
        assert llm.status.num_blocks == 7


def test_float8_cache_changes_logprobs_slightly(reference: ReferenceModels, llm: LLM) -> None:
    prompt = list(range(3, 23))
    with LLM(reference.model, quantize="fp8-kv", **SMALL) as small:
        rounded, exact = (each.generate([prompt], prompt_logprobs=True)[0].prompt_logprobs for each in (small, llm))
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.5)


def test_mixed_adapters_match_single_requests(reference: ReferenceModels, llm: LLM) -> None:
    prompts: list[Any] = [text if i % 2 else reference.ids(text) for i, text in enumerate(TEXTS * 3)]
    names = [name for name in (None, *reference.adapters) for _ in range(3)]
    completions = llm.generate(prompts, stop=STOP, adapter=names)
    for prompt, name, completion in zip(prompts, names, completions, strict=True):
        token_ids, text = reference.generate(prompt, name)
        assert completion.token_ids == token_ids
        assert completion.text == text
        assert completion.prompt_ids == reference.ids(prompt)
        assert len(completion.logprobs) == len(token_ids)
        assert completion.finish_reason is (FinishReason.EOS_TOKEN if token_ids[-1] == EOS_ID else FinishReason.LENGTH)
        assert completion.error is None
        assert completion.alternatives == []
        assert completion.prompt_logprobs is None
    assert len({tuple(completion.token_ids) for completion in completions}) == len(completions)  # all differ


@pytest.mark.parametrize(
    "prompts", ["hello", ["hello"], ("hello",), [[108, 109, 110]], [108, 109, 110], (108, 109, 110)]
)
def test_single_prompt_may_be_text_tokens_or_list(prompts: Any, reference: ReferenceModels, llm: LLM) -> None:
    prompt = "hello" if "hello" in prompts else [108, 109, 110]
    assert texts(llm.generate(prompts, stop=STOP)) == [reference.generate(prompt)[1]]


def test_numpy_and_torch_token_ids_match_list(llm: LLM) -> None:
    ids = torch.tensor([108, 109, 110])
    (plain,) = llm.generate([108, 109, 110], stop=STOP)
    for given in (ids, ids.numpy(), [ids], [ids.numpy()], torch.stack([ids]), ids.numpy()[None]):
        (completion,) = llm.generate(given, stop=STOP)  # type: ignore[arg-type]
        assert completion.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert replace(completion, logprobs=plain.logprobs) == plain


def test_empty_prompt_list_returns_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], adapter=[]) == []


def test_one_adapter_applies_to_all_prompts(reference: ReferenceModels, llm: LLM) -> None:
    expected = [reference.generate(text, "second")[1] for text in TEXTS]
    assert texts(llm.generate(TEXTS, stop=STOP, adapter="second")) == expected


def test_number_of_prompts_is_not_limited(llm: LLM) -> None:
    """Accept any number of prompts. A server rejects more than 10,000 waiting requests by default."""
    assert llm._engine._scheduler.limits.max_waiting is None
    completions = llm.generate([[5, 6]] * 300, stop=StopParams(max_new_tokens=1))
    assert len({completion.text for completion in completions}) == 1


def test_sampling_is_independent_of_batch(llm: LLM) -> None:
    wishes = SamplingParams(do_sample=True, temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=3)
    names = [None, "first", "the third", "second"]
    together = llm.generate(TEXTS, wishes, STOP, adapter=names)
    alone = [llm.generate(text, wishes, STOP, adapter=name)[0] for text, name in zip(TEXTS, names, strict=True)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert together[0].token_ids != llm.generate(TEXTS[0], stop=STOP)[0].token_ids
    other = llm.generate(TEXTS[0], SamplingParams(do_sample=True, temperature=1.2, seed=4), STOP)[0]
    assert other.token_ids != together[0].token_ids


def test_prompt_logprobs_and_alternatives_match_transformers(reference: ReferenceModels, llm: LLM) -> None:
    prompts = [reference.ids(TEXTS[0]), [7]]
    actual = llm.generate(prompts, SamplingParams(num_alternatives=3), STOP, prompt_logprobs=True)
    check_logprobs(reference.base, prompts, actual)


@torch.no_grad()
def check_logprobs(model: Any, prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> None:
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids])
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        picked = logprobs[:-1].gather(-1, ids[1:, None])[:, 0].tolist()
        assert completion.prompt_logprobs == pytest.approx(picked[: len(prompt) - 1], abs=1e-4)
        assert completion.logprobs == pytest.approx(picked[len(prompt) - 1 :], abs=1e-4)
        best = logprobs[len(prompt) - 1 : -1].topk(3)
        assert [each.token_ids for each in completion.alternatives] == best.indices.tolist()


# --- Stop conditions --------------------------------------------------------------------------------------------------


def stop_within(text: str, tokens: Sequence[int], tokenizer: Any) -> str:
    """Return a string from the middle of a completion that spans several tokens."""
    middle = len(text) // 2
    assert len(tokenizer(text[middle - 1 : middle + 3])["input_ids"]) > 1
    return text[middle - 1 : middle + 3]


@pytest.mark.parametrize("include_stop", [True, False])
def test_stop_string_finishes_request(include_stop: bool, reference: ReferenceModels, llm: LLM) -> None:
    tokens, text = reference.generate(TEXTS[0], "first")
    wanted = stop_within(text, tokens, reference.tokenizer)
    end = text.index(wanted) + len(wanted)
    stop = StopParams(max_new_tokens=NEW_TOKENS, stop_strings=(wanted, "never"), include_stop=include_stop)
    before = llm.status.generated_tokens
    (completion,) = llm.generate(TEXTS[0], stop=stop, adapter="first")
    assert completion.text == (text[:end] if include_stop else text[: end - len(wanted)])
    assert completion.finish_reason is FinishReason.STOP_SEQUENCE
    assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(tokens)
    assert llm.status.generated_tokens - before == len(completion.token_ids)  # exactly one
    assert_idle(llm)
    assert "".join(chunk.text for chunk in llm.stream(TEXTS[0], stop=stop, adapter="first")) == completion.text


def test_stop_string_does_not_affect_other_prompts(reference: ReferenceModels, llm: LLM) -> None:
    text = reference.generate(TEXTS[0])[1]
    stop = StopParams(max_new_tokens=NEW_TOKENS, stop_strings=(text[2:5],), include_stop=False)
    plain = [reference.generate(each)[1] for each in TEXTS]
    expected = [each.split(text[2:5])[0] for each in plain]
    assert expected[0] != plain[0]
    assert expected[1:] == plain[1:]
    assert texts(llm.generate(TEXTS, stop=stop)) == expected


def test_stop_and_eos_token_ids_set_finish_reason(reference: ReferenceModels, llm: LLM) -> None:
    tokens, _ = reference.generate(TEXTS[1])
    (stopped,) = llm.generate(TEXTS[1], stop=StopParams(stop_token_ids=frozenset({tokens[3]})))
    assert stopped.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.finish_reason is FinishReason.STOP_SEQUENCE
    (ended,) = llm.generate(TEXTS[1], stop=StopParams(eos_token_ids=frozenset({tokens[3]})))
    assert ended.token_ids == stopped.token_ids
    assert ended.finish_reason is FinishReason.EOS_TOKEN


# --- Streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "first", "the third"])
def test_stream_matches_generate(name: str | None, reference: ReferenceModels, llm: LLM) -> None:
    sampling = SamplingParams(num_alternatives=2)
    chunks = list(llm.stream(TEXTS[3], sampling, STOP, adapter=name))
    (whole,) = llm.generate(TEXTS[3], sampling, STOP, adapter=name)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.token_id for chunk in chunks] == whole.token_ids
    assert [chunk.logprob for chunk in chunks] == pytest.approx(whole.logprobs, abs=1e-5)
    for chunk, alternatives in zip(chunks, whole.alternatives, strict=True):
        assert chunk.alternatives is not None
        assert chunk.alternatives.token_ids == alternatives.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is whole.finish_reason


@pytest.mark.parametrize("count", [0, 1, 3])
def test_closed_stream_releases_everything(count: int, llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], stop=StopParams(max_new_tokens=50, ignore_eos=True), adapter="first")
    taken = list(itertools.islice(stream, count))
    assert len(taken) == count
    assert llm.status.running == (count > 0)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_garbage_collected_stream_releases_everything(llm: LLM) -> None:
    next(llm.stream(TEXTS[0], stop=StopParams(max_new_tokens=50, ignore_eos=True)))
    assert_idle(llm)


def test_garbage_collection_of_stream_during_step_is_safe(llm: LLM, during_step: Any) -> None:
    """The garbage collector may run at any time, also in a thread that holds the lock."""

    def forget() -> "weakref.ref[Any]":
        stream = llm.stream(TEXTS[0], stop=StopParams(max_new_tokens=50, ignore_eos=True))
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        return weakref.ref(stream)

    gc.collect()
    gc.disable()
    try:
        stream = forget()
        expected = texts(llm.generate(TEXTS[1], stop=STOP))
        assert stream() is not None
        during_step(2, gc.collect)
        assert texts(llm.generate(TEXTS[1], stop=STOP)) == expected
        assert stream() is None
    finally:
        gc.enable()
    assert_idle(llm)


def test_interleaved_streams_match_single_requests(reference: ReferenceModels, llm: LLM) -> None:
    names = [None, "first", "second"]
    streams = [llm.stream(TEXTS[i], stop=STOP, adapter=name) for i, name in enumerate(names)]
    actual = [""] * len(streams)
    left = set(range(len(streams)))
    for i in itertools.cycle([0, 1, 1, 2]):
        chunk = next(streams[i], None)
        actual[i] += chunk.text if chunk else ""
        left -= set() if chunk else {i}
        if not left:
            break
    assert actual == [reference.generate(TEXTS[i], name)[1] for i, name in enumerate(names)]


def test_stream_continues_after_generate(reference: ReferenceModels, llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], stop=STOP)
    first = next(stream)
    assert texts(llm.generate(TEXTS[1:3], stop=STOP)) == [reference.generate(text)[1] for text in TEXTS[1:3]]
    assert first.text + "".join(chunk.text for chunk in stream) == reference.generate(TEXTS[0])[1]


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_threads_sharing_llm_get_correct_completions(reference: ReferenceModels, llm: LLM) -> None:
    names = [None, *reference.adapters]
    expected = {name: [reference.generate(text, name)[1] for text in TEXTS] for name in names}

    def work(number: int) -> list[str]:
        name = names[number % len(names)]
        if number % 2:
            return texts(llm.generate(TEXTS, stop=STOP, adapter=name))
        return ["".join(chunk.text for chunk in llm.stream(text, stop=STOP, adapter=name)) for text in TEXTS]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(work, range(12)))
    for number, answer_ in enumerate(answers):
        assert answer_ == expected[names[number % len(names)]]


def test_error_affects_only_its_thread(reference: ReferenceModels, llm: LLM) -> None:
    wrong: list[Any] = [TEXTS[0], []]

    def work(number: int) -> list[str]:
        if number % 2:
            with pytest.raises(InputError):
                llm.generate(wrong, stop=STOP)
            return []
        return texts(llm.generate(TEXTS, stop=STOP))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(8)))
    assert answers[::2] == [[reference.generate(text)[1] for text in TEXTS]] * 4


def test_stream_is_complete_if_another_thread_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees a token's effects atomically, although the applying thread may stop at any point."""
    expected = "".join(chunk.text for chunk in llm.stream(TEXTS[0], stop=STOP))
    stream = llm.stream(TEXTS[0], stop=STOP)
    parts = [next(stream).text]
    inside, go_on = threading.Event(), threading.Event()
    run = next(iter(llm._generations.values()))
    append_output = run.append_output

    def slowly(output: Any) -> None:
        append_output(output)
        if run.is_done:
            inside.set()
            assert go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(run, "append_output", slowly)
    other = threading.Thread(target=lambda: llm.generate(TEXTS[1], stop=StopParams(max_new_tokens=30)))
    other.start()
    assert inside.wait(TIMEOUT_S)
    reader = threading.Thread(target=lambda: parts.extend(chunk.text for chunk in stream))
    reader.start()
    go_on.set()
    reader.join()
    other.join()
    assert "".join(parts) == expected


# --- Errors -----------------------------------------------------------------------------------------------------------


def write_damaged_adapter(reference: ReferenceModels, folder: Path, what: str) -> Path:
    shutil.copytree(reference.adapters["first"], folder)
    weights = folder / "adapter_model.safetensors"
    if what == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "not json":
        (folder / "adapter_config.json").write_text("{")
    elif what == "not finite":
        content = bytearray(weights.read_bytes())
        content[-4:] = b"\x00\x00\xc0\x7f"
        weights.write_bytes(content)
    elif what == "no weights":
        weights.unlink()
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
    elif what == "other targets":
        config = json.loads((folder / "adapter_config.json").read_text()) | {"target_modules": TARGETS[1:]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    elif what == "expanded":
        rank, hidden_size = 64 * VOCAB, reference.base.config.hidden_size
        factors = {"A": torch.ones(rank, hidden_size), "B": torch.ones(VOCAB, 64)}
        save_file({f"base_model.model.lm_head.lora_{name}.weight": factors[name] for name in "AB"}, weights)
        blocks = {"target_modules_bd_a": [], "target_modules_bd_b": ["lm_head"], "nblocks": VOCAB}
        config = {"peft_type": "LORA", "r": rank, "target_modules": ["lm_head"], "use_bdlora": blocks}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


DAMAGES = ["cut short", "not json", "not finite", "no weights", "tokenizer", "other targets", "expanded"]


@pytest.fixture(scope="module")
def broken_llm(reference: ReferenceModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("damaged")
    damaged = {what: write_damaged_adapter(reference, folder / what, what) for what in DAMAGES}
    gone = folder / "gone"
    with LLM(reference.model, reference.adapters | damaged | {"gone": gone}, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize(
    "what", slow_except({"cut short", "other targets", "gone", "unknown"}, [*DAMAGES, "gone", "unknown"])
)
def test_invalid_adapter_fails_only_its_prompts(what: str, reference: ReferenceModels, broken_llm: LLM) -> None:
    names = ["first", what, None, what]
    for _ in range(2):  # also while the failure is remembered
        with pytest.raises(AdapterError) as caught:
            broken_llm.generate(TEXTS, stop=STOP, adapter=names)
        assert isinstance(caught.value, AdapterNotFoundError) == (what in ("gone", "unknown"))
        assert_idle(broken_llm)
        completions = broken_llm.generate(TEXTS, stop=STOP, adapter=names, on_error="return")
        assert [type(each.error) for each in completions] == [type(None), type(caught.value)] * 2
        assert texts(completions[::2]) == [reference.generate(TEXTS[0], "first")[1], reference.generate(TEXTS[2])[1]]
        assert texts(completions[1::2]) == ["", ""]
        assert_idle(broken_llm)
    with pytest.raises(type(caught.value)):
        next(broken_llm.stream("hello", adapter=what))
    with pytest.raises(AdapterError):
        broken_llm.generate("hello", adapter=what)


def test_adapter_expanding_beyond_host_memory_is_rejected_before_reading(broken_llm: LLM) -> None:
    """BD-LoRA factor B needs a thousand times more space in memory than in the file."""
    with pytest.raises(AdapterError, match=r"may need \d+ bytes of host memory; .* raise adapter_host_bytes"):
        broken_llm.load_adapter("expanded")
    assert_idle(broken_llm)


def test_unknown_adapter_error_lists_known_adapters(llm: LLM) -> None:
    for use in (llm.load_adapter, llm.unload_adapter, lambda name: llm.generate("hello", adapter=name)):
        with pytest.raises(AdapterNotFoundError, match="'fourth' is unknown; known adapters: first, second, the third"):
            use("fourth")


@pytest.mark.parametrize("what", ["not finite", "gone"])
def test_load_of_invalid_adapter_fails(what: str, broken_llm: LLM) -> None:
    with pytest.raises(AdapterError):
        broken_llm.load_adapter(what, pin=True)
    assert_idle(broken_llm)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty"),
    ("", "empty"),
    ([5] * 200, "must be <= 128"),
    ([5, VOCAB], "beyond the vocabulary"),
    ([5, 2**31 - 1], "beyond the vocabulary"),
    ([5, 2**31], "beyond the vocabulary"),
    ([5, 2**70], "beyond the vocabulary"),
    ([-1, 5], "beyond the vocabulary"),
    (["a", "b"], "text or a list of token ids"),
    ([5.0, 6.0], "text or a list of token ids"),
    ([5, None], "text or a list of token ids"),
    (7.5, "text or a list of token ids"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_invalid_prompt_fails_only_its_completion(
    prompt: Any, message: str, reference: ReferenceModels, llm: LLM
) -> None:
    prompts = [TEXTS[0], prompt, TEXTS[1]]
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, stop=STOP)
    assert_idle(llm)
    first, bad, last = llm.generate(prompts, stop=STOP, on_error="return")
    assert isinstance(bad.error, InputError)
    assert bad.finish_reason is None
    assert texts([first, last]) == [reference.generate(TEXTS[0])[1], reference.generate(TEXTS[1])[1]]


def test_invalid_arguments_raise_input_error(llm: LLM) -> None:
    with pytest.raises(InputError, match="2 prompts, but 1 adapters"):
        llm.generate(["a", "b"], adapter=["first"])
    with pytest.raises(InputError, match=r"on_error must be 'raise' or 'return' \(got 'ignore'\)"):
        llm.generate("a", on_error="ignore")


def test_error_during_generation_keeps_partial_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make logits NaN during generation. The text so far is kept."""
    plain = llm.generate(TEXTS[:2], stop=STOP)
    executor = llm._engine._executor
    collect, count = executor.collect, itertools.count()

    def spoil() -> Any:
        result = collect()
        if next(count) == 3:
            result.logprobs[0] = float("nan")
        return result

    monkeypatch.setattr(executor, "collect", spoil)
    completions = llm.generate(TEXTS[:2], stop=STOP, on_error="return")
    (failed,) = [each for each in completions if each.error is not None]
    place = completions.index(failed)
    assert "are NaN" in str(failed.error)
    assert failed.token_ids == plain[place].token_ids[:3]
    assert failed.text
    assert plain[place].text.startswith(failed.text)
    assert completions[1 - place].text == plain[1 - place].text
    count = itertools.count()
    with pytest.raises(Exception, match="are NaN"):
        list(llm.stream(TEXTS[0], stop=STOP))


@pytest.mark.parametrize("error", [ValueError("a bug"), InputError("a bug")])
def test_invalid_output_does_not_affect_other_requests(
    error: Exception, reference: ReferenceModels, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_output = Generation.append_output

    def fail(run: Generation, output: Any) -> None:
        if run.completion.prompt_ids == reference.ids(TEXTS[0]) and len(run.completion.token_ids) == 3:
            raise error
        append_output(run, output)

    monkeypatch.setattr(Generation, "append_output", fail)
    failed, *others = llm.generate(TEXTS, stop=STOP, on_error="return")
    assert isinstance(failed.error, LoraxError)
    assert "a bug" in str(failed.error)
    assert len(failed.token_ids) == 3
    assert texts(others) == [reference.generate(text)[1] for text in TEXTS[1:]]
    assert_idle(llm)
    with pytest.raises(LoraxError, match="a bug"):
        list(llm.stream(TEXTS[0], stop=STOP))
    assert_idle(llm)


@pytest.mark.parametrize(
    "poison", [{"size": 1e18}, {"size": 3e10, "lora_alpha": 1e18}], ids=["huge weights", "huge scale"]
)
def test_nan_adapter_does_not_affect_other_adapters(
    reference: ReferenceModels, tmp_path: Path, poison: dict[str, Any]
) -> None:
    """The weights are finite, but the logits are NaN. Other requests share its steps and later its blocks."""
    write_adapter(copy.deepcopy(reference.base), tmp_path / "poison", 3, **poison)
    adapters = {"poison": tmp_path / "poison", "first": reference.adapters["first"]}
    with LLM(reference.model, adapters, **SMALL) as llm:
        prompts, names = [*TEXTS, *TEXTS], ["poison", None, "first", "poison", "first", "poison", None, "first"]
        for _ in range(3):
            for prompt, name, actual in zip(
                prompts, names, llm.generate(prompts, stop=STOP, adapter=names, on_error="return"), strict=True
            ):
                if name == "poison":
                    assert "are NaN" in str(actual.error)
                else:
                    assert actual.text == reference.generate(prompt, name)[1]


# --- Adapter locations ------------------------------------------------------------------------------------------------


def test_adapters_outside_folder_are_not_found(reference: ReferenceModels, tmp_path: Path) -> None:
    with LLM(str(reference.model), str(reference.root), **SMALL) as llm:
        for name in ("first", str(reference.root / "second")):
            expected = reference.generate("hello", Path(name).name)[1]
            assert texts(llm.generate("hello", stop=STOP, adapter=name)) == [expected]
        for outside in (str(reference.adapters["the third"]), "../else where/third (copy)", "/etc", "nothing"):
            with pytest.raises(AdapterNotFoundError, match="no such folder below"):
                llm.generate("hello", adapter=outside)
        assert_idle(llm)


def test_adapter_names_can_map_to_paths_and_links(
    reference: ReferenceModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use relative paths, two names for one folder, and links as in the hub cache."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(reference.adapters["second"], blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    shutil.copytree(reference.adapters["first"], tmp_path / "near" / "one")
    monkeypatch.chdir(tmp_path / "near")
    adapters: dict[str, str | Path]
    adapters = {"a b": "one", "twin": Path("one"), "ü/…": reference.adapters["the third"], "linked": "../snapshots/abc"}
    with LLM(reference.model, adapters, **SMALL) as llm:
        monkeypatch.chdir("/")
        actual = llm.generate(["hello"] * 4, stop=STOP, adapter=list(adapters))
        status = llm.status
        with pytest.raises(AdapterNotFoundError):  # not even by its path
            llm.generate("hello", adapter=str(reference.adapters["second"]))
    expected = [reference.generate("hello", name)[1] for name in ("first", "first", "the third", "second")]
    assert texts(actual) == expected
    assert status.adapters_prepared == 3  # both names share one adapter


def test_llm_without_adapters_rejects_adapter(reference: ReferenceModels) -> None:
    nothings: list[Any] = [None, {}]
    for adapters in nothings:
        with LLM(reference.model, adapters, **SMALL) as llm:
            assert texts(llm.generate("hello", stop=STOP)) == [reference.generate("hello")[1]]
            with pytest.raises(AdapterError):
                llm.generate("hello", adapter="first")


def test_replaced_adapter_files_are_used_by_next_request(reference: ReferenceModels, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(reference.adapters["first"], folder)
    with LLM(reference.model, {"x": folder}, **SMALL) as llm:
        assert texts(llm.generate("hello", stop=STOP, adapter="x")) == [reference.generate("hello", "first")[1]]
        for name in ("second", "the third", "first"):
            shutil.copytree(reference.adapters[name], folder, dirs_exist_ok=True)
            assert texts(llm.generate("hello", stop=STOP, adapter="x")) == [reference.generate("hello", name)[1]]
        llm.load_adapter("x", pin=True)
        assert llm.status.adapters_on_device == 3
        shutil.copytree(reference.adapters["second"], folder, dirs_exist_ok=True)
        llm.unload_adapter("x")  # both versions: the loaded one and the current one
        assert llm.status.adapters_on_device == 1
        llm.load_adapter("x", pin=True)
        shutil.rmtree(folder)
        llm.unload_adapter("x")
        assert llm.status.adapters_on_device == 1
        assert_idle(llm)


def test_start_seconds_lists_all_phases(reference: ReferenceModels, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lorax_server"), LLM(reference.model, reference.adapters, **SMALL) as llm:
        assert list(llm.start_seconds) == ["tokenizer", "imports", "kernels", "weights", "memory", "graphs", "adapters"]
        assert all(seconds >= 0 for seconds in llm.start_seconds.values())
    (said,) = [record.message for record in caplog.records if record.message.startswith("started in ")]
    assert all(name in said for name in llm.start_seconds)
    assert sum(record.message.startswith("memory: weights ") for record in caplog.records) == 1


def test_pinned_adapter_stays_loaded_until_unload(reference: ReferenceModels) -> None:
    with LLM(reference.model, reference.adapters, **SMALL | {"adapter_bytes": 14_000}) as llm:  # room for one
        llm.load_adapter("first")
        assert (llm.status.adapters_on_device, llm.status.adapters_loaded) == (1, 1)
        llm.generate("hello", stop=STOP, adapter="first")
        assert llm.status.adapters_loaded == 1  # it was there
        llm.load_adapter("second", pin=True)
        assert (llm.status.adapters_on_device, llm.status.adapters_evicted_from_device) == (1, 1)
        with pytest.raises(AdapterError, match="pinned"):
            llm.generate("hello", stop=STOP, adapter="first")
        llm.unload_adapter("second")
        assert llm.status.adapters_on_device == 0
        assert texts(llm.generate("hello", stop=STOP, adapter="the third")) == [
            reference.generate("hello", "the third")[1]
        ]
        llm.unload_adapter("first")  # which is not there
        assert_idle(llm)


def test_adapter_with_added_tokens_matches_peft(reference: ReferenceModels, tmp_path: Path) -> None:
    """Tokens that an adapter adds to the vocabulary are tokenized, generated and decoded as with PEFT."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(ADDED[:-1])
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED[-1:]})
    assert len(tokenizer) > VOCAB
    base = copy.deepcopy(reference.base)
    torch.manual_seed(11)
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for matrix in (base.get_input_embeddings().weight, base.get_output_embeddings().weight):
        matrix.data[VOCAB:].normal_(0, 0.4)
    folder = write_adapter(base, tmp_path / "tokens", 5, target_modules=["q_proj", "v_proj"])
    tokenizer.save_pretrained(folder)
    oracle = reference.load(folder, len(tokenizer))
    prompts = [f"hello {ADDED[-2]} the {ADDED[3]}", f"{ADDED[-1]}dog"]
    with LLM(reference.model, {"tokens": folder} | reference.adapters, **SMALL) as llm:
        completions = llm.generate([*prompts, prompts[0]], stop=STOP, adapter=["tokens", "tokens", None])
        (with_bias,) = llm.generate(
            prompts[0], SamplingParams(logit_bias={VOCAB + 1: 1e5}), StopParams(max_new_tokens=2), adapter="tokens"
        )
        with pytest.raises(InputError, match="beyond the vocabulary of 300"):
            llm.generate(completions[0].prompt_ids)
        # Its tokenizer alone is another one.
        other = make_tokenizer()
        other.add_tokens(["quick"])
        other.save_pretrained(folder)
        (changed,) = llm.generate("the quick", stop=STOP, adapter="tokens")
    for prompt, completion in zip(prompts, completions, strict=False):
        ids = tokenizer(prompt)["input_ids"]
        assert max(ids) >= VOCAB
        assert completion.prompt_ids == ids
        assert (completion.token_ids, completion.text) == generate_greedy(oracle, tokenizer, ids)
    assert completions[2].text == reference.generate(prompts[0])[1]
    assert with_bias.text == tokenizer.convert_ids_to_tokens(VOCAB + 1) * 2
    ids = other("the quick")["input_ids"]
    assert len(other) - 1 in ids
    assert changed.prompt_ids == ids
    assert (changed.token_ids, changed.text) == generate_greedy(oracle, other, ids)


def test_adapter_tokenizer_cache_is_bounded(
    reference: ReferenceModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two adapter tokenizers are cached, and transformers never loads them in this process."""
    monkeypatch.setattr(adapter_tokenizers, "MAX_OWN_TOKENIZERS", 2)
    folders = {str(number): tmp_path / str(number) for number in range(4)}
    for number, folder in folders.items():
        shutil.copytree(reference.adapters["first"], folder)
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([f"<{number}>"])
        tokenizer.save_pretrained(folder)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _not_here)
    with LLM(reference.model, folders, **SMALL) as llm:
        names = [*folders, "0", "3", "3"]
        completions = llm.generate(["hello"] * len(names), stop=STOP, adapter=names)
        assert len(llm._tokenizers._own_tokenizers) == 2
    assert texts(completions) == [reference.generate("hello", "first")[1]] * len(names)


@pytest.mark.parametrize("problem", [ConfigError("takes longer than 60 s"), OSError(28, "No space left on device")])
def test_failed_tokenizer_is_retried(
    reference: ReferenceModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    shutil.copytree(reference.adapters["first"], tmp_path / "own")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<own>"])
    tokenizer.save_pretrained(tmp_path / "own")
    with LLM(reference.model, {"own": tmp_path / "own"}, **SMALL) as llm:
        clock = Clock()
        llm._tokenizers = adapter_tokenizers.AdapterTokenizers(
            llm._tokenizer, reference.model, llm._sandbox, clock=clock
        )
        with monkeypatch.context() as patch:
            patch.setattr(adapter_tokenizers, "load_own_tokenizer", tried := Mock(side_effect=problem))
            failed = llm.generate(["hello"] * 3, stop=STOP, adapter="own", on_error="return")
            assert tried.call_count == 1
        assert [type(each.error) for each in failed] == [AdapterError] * 3
        assert len({str(each.error) for each in failed}) == 1
        clock.now += adapter_tokenizers.FAILURE_TTL_S
        (completion,) = llm.generate("hello", stop=STOP, adapter="own")
    assert completion.text == reference.generate("hello", "first")[1]


def test_thread_settings_are_unchanged(reference: ReferenceModels) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        with LLM(reference.model, **SMALL):
            assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before)


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("transformers was asked in this process")


# --- Fallback models --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fallback_architecture_matches_transformers(tmp_path: Path, reference: ReferenceModels) -> None:
    config = SERVED["codegen"]()
    assert config.model_type not in MODEL_CLASSES
    oracle, tokenizer = make_model(config), make_tokenizer()
    folder = save(tmp_path / "model", oracle, tokenizer)
    with LLM(folder, reference.adapters, max_num_seqs=3) as llm:  # wherever such models run
        prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
        actual = llm.generate(TEXTS, SamplingParams(num_alternatives=3), STOP, prompt_logprobs=True)
        for prompt, completion in zip(prompts, actual, strict=True):
            assert (completion.token_ids, completion.text) == generate_greedy(oracle, tokenizer, prompt)
        check_logprobs(oracle, prompts, actual)
        assert llm.generate([7], stop=STOP, prompt_logprobs=True)[0].prompt_logprobs == []
        assert "".join(chunk.text for chunk in llm.stream(TEXTS[0], stop=STOP)) == actual[0].text
        with pytest.raises(AdapterError, match="this model does not support adapters"):
            llm.generate(TEXTS[0], adapter="first")
        mixed = llm.generate(TEXTS[:2], stop=STOP, adapter=["first", None], on_error="return")
        assert isinstance(mixed[0].error, AdapterError)
        assert mixed[1].text == actual[1].text
        with pytest.raises(AdapterError, match="does not support adapters"):
            llm.load_adapter("first")
        assert_idle(llm)


# --- Progress bar -----------------------------------------------------------------------------------------------------


def test_progress_argument_shows_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS, stop=STOP, progress=True)
    shown = capfd.readouterr().err
    assert "4/4" in shown
    assert "prompt" in shown
    llm.generate(TEXTS, stop=STOP)  # captured output is no terminal
    llm.generate(TEXTS, stop=STOP, progress=False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("prompts", "is_shown"), [(TEXTS, True), (TEXTS[:1], False)])
def test_progress_bar_is_shown_on_terminal_for_many_prompts(
    prompts: list[str], is_shown: bool, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(prompts, stop=STOP)
    assert ("4/4" in capsys.readouterr().err) == is_shown


def test_progress_counts_failures(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts: list[Any] = [*TEXTS, []]
    llm.generate(prompts, stop=STOP, progress=True, on_error="return")
    assert "5/5" in capfd.readouterr().err


# --- Interrupts, failures and close -----------------------------------------------------------------------------------


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Return a function that simulates Ctrl-C, even if the tests run without a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_llm_is_usable_after_sigint(
    number: int, reference: ReferenceModels, llm: LLM, during_step: Any, interrupt: Any
) -> None:
    expected = [reference.generate(text, "first")[1] for text in TEXTS]
    assert texts(llm.generate(TEXTS, stop=STOP, adapter="first")) == expected
    steps = llm.status.steps
    during_step(number, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, stop=STOP, adapter="first")
    assert llm.status.steps == steps + number + 1  # the interrupted step was completed
    assert_idle(llm)
    assert texts(llm.generate(TEXTS, stop=STOP, adapter="first")) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigint_between_steps_leaves_engine_idle(
    reference: ReferenceModels, llm: LLM, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]
) -> None:
    monkeypatch.setattr(llm, "_finish", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, stop=STOP)
    monkeypatch.undo()
    assert_idle(llm)
    assert texts(llm.generate(TEXTS[0], stop=STOP)) == [reference.generate(TEXTS[0])[1]]


@pytest.fixture
def closable_llm(reference: ReferenceModels) -> Iterator[LLM]:
    llm = LLM(reference.model, reference.adapters, **SMALL)
    yield llm
    llm.close()


def use(llm: LLM) -> list[Callable[[], object]]:
    return [
        lambda: llm.generate("hello"),
        lambda: llm.generate("hello", on_error="return"),
        lambda: llm.generate("hello", adapter="first", on_error="return"),
        lambda: next(llm.stream("hello")),
        lambda: llm.load_adapter("first"),
        lambda: llm.unload_adapter("first"),
        lambda: llm.status,
    ]


def test_closed_llm_raises(closable_llm: LLM) -> None:
    closable_llm.generate("hello", adapter="first")
    stream = closable_llm.stream("hello", stop=STOP)
    next(stream)
    engine = weakref.ref(closable_llm._engine)
    closable_llm.close()
    closable_llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        list(stream)
    for call in use(closable_llm):
        with pytest.raises(EngineError, match="this LLM is closed"):
            call()
    with closable_llm:
        pass
    until = time.monotonic() + TIMEOUT_S
    while engine() is not None:  # the threads that looked for adapters may hold it until they end
        assert time.monotonic() < until, "the memory is not given back"
        time.sleep(0.01)
        gc.collect()


def test_close_fails_running_threads(closable_llm: LLM) -> None:
    began = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in closable_llm.stream("hello", stop=StopParams(max_new_tokens=100, ignore_eos=True)):
                began.set()
                assert closed.wait(TIMEOUT_S)
        except EngineError as error:
            errors.append(error)

    closed = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(TIMEOUT_S)
    closable_llm.close()
    closed.set()
    thread.join()
    assert [str(error) for error in errors] == ["this LLM is closed"]


def test_engine_failure_fails_all_threads(closable_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = closable_llm.stream("hello", stop=STOP)
    next(stream)

    def fail(plan: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(closable_llm._engine._executor, "submit", fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        closable_llm.generate("hello")
    with pytest.raises(EngineError, match="failed: the device is lost"):
        list(stream)
    for call in use(closable_llm):
        with pytest.raises(EngineError, match="the engine of this LLM failed: the device is lost"):
            call()
    closable_llm.close()


@pytest.mark.slow
def test_invalid_model_fails_to_load(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such file or directory"):
        LLM(tmp_path / "nothing", device="cpu")
