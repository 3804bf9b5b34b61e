"""Makes model and adapter folders of random weights, as real files, in seconds.

    python benchmarks/gpu_model.py FOLDER --adapters N --rank R

writes `FOLDER/model` and `FOLDER/adapters/adapter-000` to N - 1. All random numbers are stretches of one pool, which a
GPU draws if there is one: each tensor begins somewhere else in it. On Linux, /dev/shm is a folder in memory.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STD = 0.02
SLACK = 2**20  # numbers of the pool beyond its largest tensor: the first numbers of tensors are among these
SHARD_BYTES = 4 * 10**9
NUM_THREADS = 16
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ModelShape(NamedTuple):
    """The sizes of a Llama model, by their names in its config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of a layer's linears, by the names that adapters use."""
        hidden, between = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (between, hidden),
            "up_proj": (between, hidden),
            "down_proj": (hidden, between),
        }

    def list_modules(self, names: Sequence[str] = ALL_MODULES) -> dict[str, tuple[int, int]]:
        """Return the outputs and inputs of the linears of these names in all layers, by their full names."""
        layers = range(self.num_hidden_layers)
        return {f"model.layers.{layer}.{_path(name)}": self.linears[name] for layer in layers for name in names}


LLAMA_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, 131072)
TINY = ModelShape(1024, 256, 512, 2, 4, 2, 64, 2048)


class Pool:
    """Random numbers in bfloat16, of which tensors take stretches."""

    def __init__(self, largest: int) -> None:
        """`largest` is the number of elements of the largest tensor that will be taken."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        numbers = torch.empty(largest + SLACK, dtype=torch.bfloat16, device=device)
        self._bytes = _bytes_of(numbers.normal_(0, STD, generator=generator).cpu())

    def take(self, choice: random.Random, shape: Sequence[int]) -> memoryview:
        start = choice.randrange(SLACK)
        return self._bytes[2 * start : 2 * (start + math.prod(shape))]


class Stored(NamedTuple):
    """The shape of a tensor in bfloat16, and its bytes."""

    shape: tuple[int, ...]
    content: memoryview


def make_model(folder: Path, shape: ModelShape) -> None:
    """Write a model: config, weights in shards, tokenizer with a chat template."""
    pool, choice = Pool(shape.vocab_size * shape.hidden_size), random.Random(0)
    write_model(folder, _model_tensors(pool, choice, shape), _list_settings(shape))


def write_model(folder: Path, tensors: Iterable[tuple[str, Stored]], config: dict[str, Any]) -> None:
    """Write a model of these tensors and this config, whose ends are those of the tokenizer that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Stored]] = [{}]
    size = total = 0
    for name, tensor in tensors:
        if size and size + len(tensor.content) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += len(tensor.content)
        total += len(tensor.content)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(_write_tensors, [folder / file for file in files], shards))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    vocab_size = config["vocab_size"]
    bos = vocab_size - _num_special(vocab_size)
    ends = {"bos_token_id": bos, "eos_token_id": bos + 1}
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends)
    write_tokenizer(folder, vocab_size)


def make_adapter(
    folder: Path,
    shape: ModelShape,
    seed: int,
    rank: int = 16,
    modules: Sequence[str] = ALL_MODULES,
    use_dora: bool = False,
) -> None:
    """Write one adapter as PEFT does. Its contents follow from the seed, and differ from those of all others."""
    linears = shape.list_modules(modules)
    _write_adapter(_adapter_pool(linears, rank), folder, linears, seed, rank, use_dora)


def make_adapters(folder: Path, shape: ModelShape, count: int, rank: int = 16, first_seed: int = 0) -> list[str]:
    """Write adapters for all modules to subfolders, and return the names of these."""
    return write_adapters(folder, shape.list_modules(), count, rank, first_seed)


def write_adapters(
    folder: Path, linears: Mapping[str, tuple[int, int]], count: int, rank: int = 16, first_seed: int = 0
) -> list[str]:
    """Write adapters for these linears, outputs and inputs by name, and return the names of their subfolders."""
    pool = _adapter_pool(linears, rank)
    names = [f"adapter-{i:03}" for i in range(count)]

    def write(index: int) -> None:
        _write_adapter(pool, folder / names[index], linears, first_seed + index, rank, False)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(write, range(count)))
    return names


# --- Weights ----------------------------------------------------------------------------------------------------------


def _model_tensors(pool: Pool, choice: random.Random, shape: ModelShape) -> Iterator[tuple[str, Stored]]:
    hidden = (shape.hidden_size,)
    ones = Stored(hidden, _bytes_of(torch.ones(hidden, dtype=torch.bfloat16)))
    table = (shape.vocab_size, shape.hidden_size)
    yield "model.embed_tokens.weight", Stored(table, pool.take(choice, table))
    for layer in range(shape.num_hidden_layers):
        for module, sizes in shape.linears.items():
            yield f"model.layers.{layer}.{_path(module)}.weight", Stored(sizes, pool.take(choice, sizes))
        yield f"model.layers.{layer}.input_layernorm.weight", ones
        yield f"model.layers.{layer}.post_attention_layernorm.weight", ones
    yield "model.norm.weight", ones
    yield "lm_head.weight", Stored(table, pool.take(choice, table))


def _adapter_pool(linears: Mapping[str, tuple[int, int]], rank: int) -> Pool:
    return Pool(rank * max(max(sizes) for sizes in linears.values()))


def _write_adapter(
    pool: Pool, folder: Path, linears: Mapping[str, tuple[int, int]], seed: int, rank: int, use_dora: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    choice = random.Random(f"adapter {seed} {rank}")
    tensors: dict[str, Stored] = {}
    for name, (outputs, inputs) in linears.items():
        for factor, sizes in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = Stored(sizes, pool.take(choice, sizes))
        if use_dora:
            magnitude = _make_magnitude(choice, outputs, inputs)
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
    _write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": use_dora,
        "target_modules": list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears)),
    }
    _write_json(folder / "adapter_config.json", config)


def _make_magnitude(choice: random.Random, outputs: int, inputs: int) -> Stored:
    """Draw the magnitudes of DoRA's rows: about the norms of random rows, so that activations keep their size."""
    generator = torch.Generator().manual_seed(choice.randrange(2**32))
    factors = 1 + 0.1 * (2 * torch.rand(outputs, generator=generator) - 1)
    magnitude = (STD * math.sqrt(inputs) * factors).bfloat16()
    return Stored((outputs,), _bytes_of(magnitude))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def _path(module: str) -> str:
    return f"self_attn.{module}" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else f"mlp.{module}"


def _write_tensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file without copying the tensors first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.content)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.content)


# --- Configs and tokenizer --------------------------------------------------------------------------------------------


def _list_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": min(8192, shape.max_position_embeddings // 8),
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **shape._asdict(),
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer: the 256 bytes, then words of letters, then special tokens.

    It has no merges: a text becomes its bytes. Only the tokens that a model chooses are words. Texts are cut into words
    first, as by real tokenizers, of which `tokenizers` keeps the last 10,000.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    bytes_ = [chr(byte) for byte in sorted(visible)] + [chr(256 + i) for i in range(256 - len(visible))]
    num_words = vocab_size - _num_special(vocab_size)
    words = ["Ġ" + _spell(i) for i in range(num_words - len(bytes_))]
    special = [BOS, EOS, *(f"<|reserved_special_token_{i}|>" for i in range(_num_special(vocab_size) - 2))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bos, sequence = {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": num_words + i, "content": token, **flags} for i, token in enumerate(special)],
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, sequence],
            "pair": [bos, sequence, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [num_words], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(bytes_ + words)}, "merges": []},
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _num_special(vocab_size: int) -> int:
    return min(256, vocab_size // 16)


def _spell(number: int) -> str:
    """Spell a number in at least two letters: single ones are bytes."""
    letters = ""
    while number or len(letters) < 2:
        number, digit = divmod(number, 26)
        letters = chr(ord("a") + digit) + letters
    return letters


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="all files go here")
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="number of adapters")
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="their rank")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of the 8B shape")
    args = parser.parse_args()
    shape = TINY if args.tiny else LLAMA_8B
    begin = time.monotonic()
    make_model(args.folder / "model", shape)
    middle = time.monotonic()
    make_adapters(args.folder / "adapters", shape, args.adapters, args.rank)
    print(f"model in {middle - begin:.1f} s, {args.adapters} adapters in {time.monotonic() - middle:.1f} s")


if __name__ == "__main__":
    main()
