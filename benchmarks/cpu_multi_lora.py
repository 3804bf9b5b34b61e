"""Measure decode with mixed adapters on a CPU, and compare with transformers and PEFT in the same process.

The model is a random Llama with 160M parameters and a batch of 16 sequences. PEFT writes rank-16 adapters on all linear
layers, and both systems load the same files. PEFT receives `adapter_names`, one per sequence. Each value is the best of
several alternating runs.
"""

import json
import tempfile
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from harness.models import LLAMA_160M, VOCAB, Paged, best_of, build_ours, fill
from harness.report import Record, make_parser, report
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.adapters.config import parse_config
from lorax_server.adapters.host import prepare
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.distributed import FakeGroup
from lorax_server.files.names import CONFIG_FILE
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.worker.adapter_memory import AdapterMemory

BATCH, CONTEXT, RUNS = 16, 256, 24
PROMPT = 64
RANK = 16
COUNTS = (0, 1, 4, 16)
GOALS = {4: 2.0, 16: 2.0}
SHARE_OF_BASE = 0.7  # share of base model speed with 16 adapters
OTHER_RANKS = (8, 32, 64)
Step = Callable[[], torch.Tensor]


def write_adapters(base: Any, folder: Path, rank: int, number: int) -> tuple[PeftModel, list[Path]]:
    names = [f"r{rank}-{index}" for index in range(number)]
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.02)
    model.save_pretrained(folder)
    return model.eval(), [folder / name for name in names]


def load_ours(model: Any, folders: list[Path], dtype: torch.dtype = torch.float32) -> AdapterArena:
    targets = collect_adapter_targets(model)
    hosts = []
    for folder in folders:
        config = parse_config(json.loads((folder / CONFIG_FILE).read_text()), folder.name)
        hosts.append(prepare(StoredAdapter(folder, config, targets), targets, dtype, FakeGroup()))
    memory = AdapterMemory(targets, dtype, torch.device("cpu"), sum(host.units for host in hosts), 1 + len(hosts))
    place = 0
    for index, host in enumerate(hosts, start=1):
        memory.load(index, host, place)
        place += host.units
    return memory.arena


def rows(number: int) -> list[int]:
    """Return the adapter of each sequence, sorted in the same way as in the engine."""
    return sorted(index % number + 1 for index in range(BATCH)) if number else [0] * BATCH


def ours(model: Any, arena: AdapterArena, number: int, cache: DynamicCache | None = None) -> Step:
    """Return a decode step with `number` adapters. Our KV cache and the cache of transformers contain the same random
    values.
    """
    paged = Paged(model, BATCH, CONTEXT + RUNS + 2)
    fill(paged, DynamicCache(config=model.config) if cache is None else cache, CONTEXT)
    ids, position = torch.arange(BATCH)[:, None] + 100, count(CONTEXT)
    adapters = torch.tensor(rows(number))

    def step() -> torch.Tensor:
        # Rebuilt in every step, as for a batch that has just changed.
        meta = AdapterBatchMetadata.from_indices(adapters)
        return paged.forward(ids, next(position), AdapterBatchData(meta, arena))

    return step


def theirs(model: Any, names: list[str], number: int, cache: DynamicCache) -> Step:
    ids = torch.arange(BATCH)[:, None] + 100
    chosen = [names[index - 1] for index in rows(number)] if number else []

    def step() -> torch.Tensor:
        if not chosen:
            with model.disable_adapter():
                return model(ids, past_key_values=cache, use_cache=True).logits[:, 0]
        return model(ids, past_key_values=cache, use_cache=True, adapter_names=chosen).logits[:, 0]

    return step


def measure(folder: Path) -> list[Record]:
    base = AutoModelForCausalLM.from_config(LLAMA_160M).eval()
    model = build_ours(LLAMA_160M, {name: x.clone() for name, x in base.state_dict().items()})
    peft_model, folders = write_adapters(base, folder, RANK, max(COUNTS))
    arena = load_ours(model, folders)
    names = [place.name for place in folders]
    # All sides take turns, because the speed of the machine varies.
    caches = {number: DynamicCache(config=model.config) for number in COUNTS}
    mine = [ours(model, arena, number, cache) for number, cache in caches.items()]
    other = [theirs(peft_model, names, number, cache) for number, cache in caches.items()]
    differences = [float((one() - two()).abs().max()) for one, two in zip(mine, other, strict=True)]
    times = best_of(RUNS, *mine, *other)
    records, speeds = [], {}
    for number, difference, our_time, their_time in zip(COUNTS, differences, times, times[len(COUNTS) :], strict=False):
        speeds[number] = BATCH / our_time
        print(
            f"{number} adapters: {speeds[number]:.0f} tokens/s, PEFT {BATCH / their_time:.0f}, "
            f"largest difference of logits {difference:.1e}",
            flush=True,
        )
        peer = "transformers + PEFT" if number else "transformers + PEFT, adapters off"
        records.append(Record(f"decode, {number} adapters", speeds[number], "tokens/s"))
        records.append(Record(f"over peer, {number} adapters", their_time / our_time, "x", peer, GOALS.get(number)))
    share = speeds[16] / speeds[0]
    records.append(Record("16 adapters, of own base", share, "of tokens/s", "our base model", SHARE_OF_BASE))
    records.append(measure_prefill(model, arena))
    return records + measure_growth(model, folder, arena)


def measure_prefill(model: Any, arena: AdapterArena) -> Record:
    """Measure 16 prompts with different adapters."""
    paged, ids = Paged(model, BATCH, PROMPT), torch.randint(0, VOCAB, (BATCH, PROMPT))

    def prefill(number: int) -> torch.Tensor:
        meta = AdapterBatchMetadata.from_indices(torch.tensor(rows(number)).repeat_interleave(PROMPT))
        return paged.forward(ids, 0, AdapterBatchData(meta, arena))

    base, adapted = best_of(RUNS // 4, lambda: prefill(0), lambda: prefill(BATCH))
    name = f"prefill {BATCH}x{PROMPT}, 16 adapters, of own base"
    return Record(name, base / adapted, "of tokens/s", "our base model", None)


def measure_growth(model: Any, folder: Path, arena: AdapterArena) -> list[Record]:
    """Measure the time that 16 adapters add to a step, by rank."""
    arenas = {RANK: arena}
    for rank in OTHER_RANKS:
        base = AutoModelForCausalLM.from_config(LLAMA_160M).eval()
        arenas[rank] = load_ours(model, write_adapters(base, folder / str(rank), rank, BATCH)[1])
    base_time, *times = best_of(RUNS, ours(model, arena, 0), *(ours(model, each, BATCH) for each in arenas.values()))
    added = {rank: seconds - base_time for rank, seconds in zip(arenas, times, strict=True)}
    return [Record(f"added by 16 of rank {rank}", added[rank] * 1e3, "ms a step") for rank in sorted(added)]


def main() -> None:
    args = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    print(f"{torch.get_num_threads()} threads, float32, vocabulary {VOCAB}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        records = measure(Path(folder))
    report(records, args.json)


if __name__ == "__main__":
    main()
