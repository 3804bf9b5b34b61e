"""`LLM.update_adapter` on a GPU: the weights are packed on the device while sequences decode."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig

from lorax_server.errors import AdapterError
from lorax_server.llm import LLM
from lorax_server.types import StopParams
from lorax_server.worker.preparer import Preparer
from tests.lora import save_adapter
from tests.models.tiny import BOS_ID, EOS_ID, VOCAB, make_model, make_tokenizer, save

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 16))
STOP = StopParams(max_new_tokens=16, ignore_eos=True)
LONG = replace(STOP, max_new_tokens=600)
NUM_VERSIONS = 4
WAIT_S = 20
BUSY_CYCLES = 200_000_000  # about a tenth of a second
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Tensors = dict[str, torch.Tensor]


class Served:
    """An engine, and the versions of one adapter: their tensors, and their tokens if they are loaded from files."""

    def __init__(self, llm: LLM, root: Path) -> None:
        self.llm = llm
        names = [f"v{number}" for number in range(NUM_VERSIONS)]
        self.tensors = [load_file(root / name / "adapter_model.safetensors") for name in names]
        self.expected = [self.generate(name) for name in names]
        assert len({tuple(each) for each in self.expected}) == NUM_VERSIONS
        self.weights = [self.read_weights(name) for name in names]

    def generate(self, adapter: str = "poet", stop: StopParams = STOP, count: int = 1) -> list[int]:
        """Return the tokens of the first of `count` requests. In batches of other sizes, rounding errors differ."""
        completions = self.llm.generate([PROMPT] * count, stop=stop, adapter=[adapter] * count)
        assert all(len(each.token_ids) == stop.max_new_tokens for each in completions)
        return completions[0].token_ids

    def read_weights(self, adapter: str) -> torch.Tensor:
        """Return the weights of a loaded adapter in device memory."""
        engine: Any = self.llm._engine
        identity = self.llm._wait_for(self.llm._resolve(adapter)).identity
        with self.llm._lock_engine():
            memory, start = engine._executor._memory, engine._table._device._space._extents[identity].start
            count = memory._loaded[engine._table._registry[identity].index].num_elements
            torch.cuda.synchronize()
            weights: torch.Tensor = memory.arena.buffer[start * memory._unit :][:count].clone()
        return weights

    def is_moved_to_host(self) -> bool:
        """Return True if the updated weights no longer use temporary memory on the GPU."""
        weights = self.llm._updates["poet"].spec.checkpoints[0].in_memory
        assert weights is not None
        return bool(weights.packed.buffer.is_cpu)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("gpu updates")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    base = make_model(config)
    for parameter in base.parameters():
        parameter.data *= 0.3  # the initialization is for smaller matrices
    for norm in (module for name, module in base.named_modules() if name.endswith("norm")):
        norm.weight.data.fill_(1)
    save(root / "model", base, make_tokenizer())
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    for number in range(NUM_VERSIONS):
        torch.manual_seed(number)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
        save_adapter(model, root / "adapters" / f"v{number}")
    save_adapter(model, root / "adapters" / "poet")
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16}
    with LLM(root / "model", root / "adapters", cache_tokens=16384, adapter_bytes=2**26, **settings) as llm:
        yield Served(llm, root / "adapters")


def move(tensors: Tensors, device: str, dtype: torch.dtype = torch.float32) -> Tensors:
    return {key: tensor.to(device, dtype, copy=True) for key, tensor in tensors.items()}


def wait_until_moved_to_host(served: Served) -> None:
    until = time.monotonic() + WAIT_S
    while not served.is_moved_to_host():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_updated_adapter_equals_adapter_from_file(
    device: str, dtype: torch.dtype, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Preparer, "_pack_tensors")  # packing in host memory is not used
    for number in (0, 1, 2):
        tensors = move(served.tensors[number], device, dtype)
        served.llm.update_adapter("poet", tensors)
        for tensor in tensors.values():
            tensor.fill_(7)  # the call has read the tensors
        assert torch.equal(served.read_weights("poet"), served.weights[number])
        assert served.generate() == served.expected[number]


@pytest.mark.parametrize("running", ["finish", "move"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_updates_while_sequences_decode(device: str, running: str, served: Served) -> None:
    served.llm.update_adapter("poet", served.tensors[0])
    versions = [move(tensors, device) for tensors in served.tensors]
    with ThreadPoolExecutor(1) as threads:
        decoding: Future[list[int]] = threads.submit(served.generate, stop=LONG, count=8)
        while not served.llm.status.running and not decoding.done():
            time.sleep(0.001)
        for number in (1, 2, 3, 1):
            served.llm.update_adapter("poet", versions[number], running=running)
            assert torch.equal(served.read_weights("poet"), served.weights[number])
            served.generate()
        decoding.result()
    wait_until_moved_to_host(served)
    assert served.generate() == served.expected[1]


def test_tensors_that_are_still_being_computed(served: Served) -> None:
    """The caller does not synchronize with its stream."""
    source, stream = move(served.tensors[1], "cuda"), torch.cuda.Stream()
    tensors = {key: torch.zeros_like(tensor) for key, tensor in source.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for key, tensor in tensors.items():
            tensor.copy_(source[key])
        served.llm.update_adapter("poet", tensors)
    assert served.generate() == served.expected[1]


def test_tensors_on_both_devices(served: Served) -> None:
    tensors = served.tensors[2] | {key: each.cuda() for key, each in list(served.tensors[2].items())[::2]}
    served.llm.update_adapter("poet", tensors)
    assert served.generate() == served.expected[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_evicted_adapter_is_loaded_again(device: str, served: Served) -> None:
    for is_early in (True, False):  # before and after the weights are copied to host memory
        served.llm.update_adapter("poet", move(served.tensors[3], device))
        if not is_early:
            wait_until_moved_to_host(served)
        served.llm.unload_adapter("poet")
        assert served.generate() == served.expected[3]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_invalid_values_are_rejected_and_old_weights_stay(device: str, value: float, served: Served) -> None:
    served.llm.update_adapter("poet", served.tensors[1])
    for key in (next(iter(served.tensors[2])), list(served.tensors[2])[-1]):
        tensors = move(served.tensors[2], device)
        tensors[key][-1, -1] = value
        with pytest.raises(AdapterError, match="non-finite"):
            served.llm.update_adapter("poet", tensors)
        assert served.generate() == served.expected[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_memory_does_not_grow(device: str, served: Served) -> None:
    versions, sizes = [move(tensors, device) for tensors in served.tensors], list[int]()
    for _ in range(4):
        for tensors in versions:  # no steps in between
            served.llm.update_adapter("poet", tensors)
        wait_until_moved_to_host(served)
        served.generate()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[1] == sizes[2] == sizes[3]
