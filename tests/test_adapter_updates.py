"""`LLM.update_adapter`: new weights take effect between two steps, and no request ever gets tokens of other weights."""

import copy
import pickle
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from lorax_server.adapters.in_memory import copy_to_host, make_spec, parse_peft_config
from lorax_server.errors import AdapterError, AdapterNotFoundError, InputError
from lorax_server.llm import LLM
from lorax_server.types import StopParams
from lorax_server.worker.copier import Copier
from lorax_server.worker.device_packer import DevicePacker
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.test_llm import NEW_TOKENS, SMALL, STOP, TARGETS, generate_greedy, write_adapter
from tests.worker.fake_copy_stream import FakeCopyStream

PROMPT = list(range(3, 16))
NUM_VERSIONS = 4
LONG = StopParams(max_new_tokens=100, ignore_eos=True)  # decodes while an update is prepared


class Versions:
    """A base model, and the versions of one adapter: their tensors, and their tokens according to PEFT."""

    def __init__(self, folder: Path) -> None:
        base, tokenizer = make_model(SERVED["llama"]()), make_tokenizer()
        self.model, self.root = save(folder / "model", base, tokenizer), folder / "adapters"
        folders = [write_adapter(copy.deepcopy(base), folder / f"v{i}", i) for i in range(NUM_VERSIONS)]
        write_adapter(copy.deepcopy(base), self.root / "poet", 0)
        write_adapter(copy.deepcopy(base), self.root / "copy of poet", 0)
        self.tensors = [load_file(each / "adapter_model.safetensors") for each in folders]
        self.oracle: Any = PeftModel.from_pretrained(copy.deepcopy(base), folders[0], adapter_name="0").eval()
        for number in range(1, NUM_VERSIONS):
            self.oracle.load_adapter(folders[number], str(number))
        self.expected = []
        for number in range(NUM_VERSIONS):
            self.oracle.set_adapter(str(number))
            self.expected.append(generate_greedy(self.oracle, tokenizer, PROMPT)[0])
        assert len({tuple(each) for each in self.expected}) == NUM_VERSIONS

    @torch.no_grad()
    def expect_move(self, before: int, after: int, num_before: int, count: int) -> list[int]:
        """Return greedy tokens if `num_before` tokens are sampled before a move. The KV cache so far is kept."""
        ids, tokens, cache = PROMPT, list[int](), None
        for step in range(count):
            self.oracle.set_adapter(str(before if step < num_before else after))
            out = self.oracle(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, [int(out.logits[0, -1].argmax())]
            tokens += ids
        return tokens


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"))


@contextmanager
def open_llm(versions: Versions, packs: bool = False, **settings: Any) -> Iterator[LLM]:
    """Open an engine. With `packs`, it updates adapters as on a GPU."""
    copier = Copier(FakeCopyStream())
    with LLM(versions.model, versions.root, **SMALL | settings) as llm:
        if packs:
            llm._engine._executor.preparer._packer = DevicePacker(torch.device("cpu"), copier)  # type: ignore[attr-defined]
        yield llm
    copier.close()


@pytest.fixture(params=[False, True], ids=["host", "device"])
def llm(versions: Versions, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(versions, request.param) as llm:
        yield llm


def test_tensors_are_copied_with_one_transfer_per_dtype() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).half(), "c": torch.randn(2, 2), "d": torch.zeros(0, 3)}
    copies = copy_to_host(tensors)
    assert copies.keys() == tensors.keys()
    assert all(torch.equal(copies[key], tensor) for key, tensor in tensors.items())
    assert copies["a"].data_ptr() != tensors["a"].data_ptr()
    assert copies["a"].untyped_storage().data_ptr() == copies["c"].untyped_storage().data_ptr()


def test_copied_tensors_are_pickled_without_other_memory() -> None:
    """Each rank of a tensor parallel group gets a pickled copy."""
    config = parse_peft_config(LoraConfig(r=2, target_modules=["q_proj"]), "a")
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    memory = torch.randn(100, 2, 512)
    tensors = {name.format(i, "A"): memory[i] for i in range(50)} | {
        name.format(i, "B"): memory[50 + i].view(512, 2) for i in range(50)
    }
    assert len(pickle.dumps(make_spec("a", tensors, config, 512))) < 2 * memory.nbytes


def generate(llm: LLM, adapter: str = "poet") -> list[int]:
    return llm.generate([PROMPT], stop=STOP, adapter=adapter)[0].token_ids


def test_new_requests_use_new_weights(versions: Versions, llm: LLM) -> None:
    assert generate(llm) == versions.expected[0]
    for number in (1, 2, 0):
        llm.update_adapter("poet", versions.tensors[number])
        assert generate(llm) == versions.expected[number]


def test_copy_under_another_name_is_not_updated(versions: Versions, llm: LLM) -> None:
    assert generate(llm, "copy of poet") == versions.expected[0]
    llm.update_adapter("poet", versions.tensors[1])
    assert generate(llm, "copy of poet") == versions.expected[0]
    assert generate(llm) == versions.expected[1]


def test_new_name_needs_config(versions: Versions, llm: LLM) -> None:
    with pytest.raises(AdapterNotFoundError):
        llm.update_adapter("novelist", versions.tensors[1])
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    llm.update_adapter("novelist", versions.tensors[1], config)
    assert generate(llm, "novelist") == versions.expected[1]
    llm.update_adapter("novelist", versions.tensors[2])
    assert generate(llm, "novelist") == versions.expected[2]


def test_caller_may_change_tensors_after_update(versions: Versions, llm: LLM) -> None:
    tensors = {name: tensor.clone() for name, tensor in versions.tensors[1].items()}
    llm.update_adapter("poet", tensors)
    for tensor in tensors.values():
        tensor.fill_(7.0)
    llm.unload_adapter("poet")  # the next request prepares the adapter again
    assert generate(llm) == versions.expected[1]


@pytest.mark.parametrize("num_before", [1, 5])
def test_running_request_finishes_on_old_weights(versions: Versions, llm: LLM, num_before: int) -> None:
    stream = llm.stream(PROMPT, stop=STOP, adapter="poet")
    tokens = [next(stream).token_id for _ in range(num_before)]
    llm.update_adapter("poet", versions.tensors[1])
    assert generate(llm) == versions.expected[1]
    assert tokens + [event.token_id for event in stream] == versions.expected[0]


def test_running_request_moves_and_keeps_its_kv_cache(
    versions: Versions, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, move, step = list[int](), llm._engine.move, llm._engine.step

    def step_patiently() -> Any:
        """Pause longer before each token, so that the request is not finished before the move on a busy machine."""
        if not counts:
            num_tokens = max((len(run.completion.token_ids) for run in llm._generations.values()), default=0)
            time.sleep(0.0005 * 1.25**num_tokens)
        return step()

    monkeypatch.setattr(llm._engine, "step", step_patiently)
    stream = llm.stream(PROMPT, stop=LONG, adapter="poet")
    copied = llm.stream(PROMPT, stop=STOP, adapter="copy of poet")
    tokens, others = [next(stream).token_id], [next(copied).token_id]
    (run,) = (run for run in llm._generations.values() if run.adapter_id == "poet")

    def record(request_ids: Sequence[int], identity: str) -> None:
        counts.append(len(run.completion.token_ids))
        move(request_ids, identity)

    monkeypatch.setattr(llm._engine, "move", record)
    llm.update_adapter("poet", versions.tensors[1], running="move")
    tokens += [event.token_id for event in stream]
    assert 0 < counts[0] < LONG.max_new_tokens - NEW_TOKENS
    assert tokens == versions.expect_move(0, 1, counts[0], LONG.max_new_tokens)
    assert others + [event.token_id for event in copied] == versions.expected[0]
    assert generate(llm) == versions.expected[1]  # shares no blocks with the request that moved


def test_waiting_request_moves(versions: Versions, llm: LLM) -> None:
    streams = [llm.stream(PROMPT, stop=STOP, adapter="copy of poet") for _ in range(4)]
    started = [next(stream) for stream in streams]  # all slots are in use
    waiting = threading.Thread(target=lambda: found.append(generate(llm)))
    found = list[list[int]]()
    waiting.start()
    while not llm.status.waiting and not found:
        time.sleep(0.001)
    llm.update_adapter("poet", versions.tensors[1], running="move")
    for first, stream in zip(started, streams, strict=True):
        assert [first.token_id, *(event.token_id for event in stream)] == versions.expected[0]
    waiting.join()
    num_tokens = len(found[0])  # the request may have started before the move
    assert found[0] in [versions.expect_move(0, 1, number, num_tokens) for number in range(num_tokens + 1)]


INVALID: dict[str, Any] = {
    "empty": {},
    "NaN": {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.full((4, 32), torch.nan)},
    "shape": {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 31)},
    "rank": {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(3, 32)},
    "dtype": {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32, dtype=torch.int32)},
    "name": {"model.layers.99.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)},
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_tensors_are_rejected_and_old_weights_stay(what: str, versions: Versions, llm: LLM) -> None:
    llm.update_adapter("poet", versions.tensors[1])
    changed = {f"base_model.model.{name}": tensor for name, tensor in INVALID[what].items()}
    with pytest.raises(AdapterError, match="'poet'"):
        llm.update_adapter("poet", versions.tensors[2] | changed if changed else {})
    assert generate(llm) == versions.expected[1]
    assert llm.status.adapters_on_host == 1


@pytest.mark.parametrize("tensors", [[torch.zeros(2)], "file.safetensors", {"a.lora_A.weight": "zero"}], ids=str)
def test_arguments_of_other_types_are_rejected(tensors: Any, versions: Versions, llm: LLM) -> None:
    with pytest.raises(AdapterError, match=r"'poet'.*tensor"):
        llm.update_adapter("poet", tensors)
    with pytest.raises(AdapterError, match=r"config must be a PEFT config or a mapping \(got str\)"):
        llm.update_adapter("poet", versions.tensors[1], "adapter_config.json")


def test_unknown_choice_for_running_requests_is_rejected(versions: Versions, llm: LLM) -> None:
    with pytest.raises(InputError, match="'finish' or 'move'"):
        llm.update_adapter("poet", versions.tensors[1], running="stop")


def test_old_tensors_are_released(versions: Versions, llm: LLM) -> None:
    llm.update_adapter("poet", versions.tensors[1])
    old = weakref.ref(llm._updates["poet"].spec)
    llm.update_adapter("poet", versions.tensors[2])
    generate(llm)
    assert old() is None
    assert llm.status.adapters_on_device == 1


def test_interrupt_after_the_switch_keeps_new_weights(
    versions: Versions, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.load_adapter("poet", pin=True)
    switch, tensors = llm._switch, {name: tensor.clone() for name, tensor in versions.tensors[1].items()}

    def interrupt(*args: Any) -> None:
        switch(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_switch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.update_adapter("poet", tensors)
    for tensor in tensors.values():
        tensor.fill_(7.0)
    (state,) = llm._engine.list_adapters([llm._updates["poet"].spec.identity])
    assert state.is_pinned
    assert generate(llm) == versions.expected[1]


def test_pin_moves_to_new_weights(versions: Versions, llm: LLM) -> None:
    llm.load_adapter("poet", pin=True)
    llm.update_adapter("poet", versions.tensors[1])
    (state,) = llm._engine.list_adapters([llm._updates["poet"].spec.identity])
    assert state.is_pinned
    assert llm.status.adapters_on_device == 1


def run_interleavings(versions: Versions, seed: int, num_actions: int, packs: bool, adapter_bytes: int) -> int:
    """Interleave updates, requests and evictions at random. Return the number of requests that finished."""
    rng, current, num_done = random.Random(seed), {"poet": 0, "copy of poet": 0}, 0
    with open_llm(versions, packs, adapter_bytes=adapter_bytes) as llm:
        streams: list[tuple[int, list[int], Iterator[Any]]] = []

        def finish(position: int) -> None:
            number, tokens, stream = streams.pop(position)
            tokens += [event.token_id for event in stream]
            assert tokens == versions.expected[number]

        for _ in range(num_actions):
            name, action = rng.choice(list(current)), rng.random()
            if action < 0.3:
                current[name] = rng.randrange(NUM_VERSIONS)
                llm.update_adapter(name, versions.tensors[current[name]])
            elif action < 0.4:
                llm.unload_adapter(name)
            elif action < 0.7 or not streams:
                stream = llm.stream(PROMPT, stop=STOP, adapter=name)
                tokens = [next(stream).token_id for _ in range(rng.choice([1, 1, 5]))]
                streams.append((current[name], tokens, stream))
            else:
                finish(rng.randrange(len(streams)))
                num_done += 1
            if len(streams) > 6:
                finish(0)
                num_done += 1
        while streams:
            finish(0)
            num_done += 1
    return num_done


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("adapter_bytes", [2**19, 30_000])  # the second has space for two adapters
def test_interleavings_never_produce_tokens_of_other_weights(
    versions: Versions, adapter_bytes: int, packs: bool
) -> None:
    assert run_interleavings(versions, 1, 60, packs, adapter_bytes) > 10


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("adapter_bytes", [2**19, 30_000])
def test_many_interleavings_never_produce_tokens_of_other_weights(
    versions: Versions, adapter_bytes: int, packs: bool
) -> None:
    assert sum(run_interleavings(versions, seed, 500, packs, adapter_bytes) for seed in range(10)) > 1500


def test_concurrent_updates_and_requests(versions: Versions, llm: LLM) -> None:
    """Each request gets the tokens of exactly one version."""

    def update() -> None:
        for number in (1, 2, 3, 1, 2):
            llm.update_adapter("poet", versions.tensors[number])

    threads = [threading.Thread(target=update) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert generate(llm) in versions.expected
    for thread in threads:
        thread.join()
    assert generate(llm) == versions.expected[2]
