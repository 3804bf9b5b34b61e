"""Writes model and adapter folders with random bfloat16 weights. Files of any size are written in seconds.

All tensors are slices of one pool of random numbers, which are drawn on a GPU if one is available. Each tensor starts
at a different offset.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")
STD = 0.02
COUNTING_SCALE = 2048.0  # the layers' outputs have a standard deviation of about 10
MAX_OFFSET = 2**20  # elements; tensors start at random offsets below this one
SHARD_BYTES = 4 * 10**9
NUM_THREADS = 16
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
Linears = Mapping[str, tuple[int, int]]  # outputs and inputs by full name


class ModelShape(NamedTuple):
    """A Llama model's dimensions, with the names in `config.json`."""

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
        """The numbers of outputs and inputs of the linear layers in a transformer layer, keyed by PEFT module name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
        return dict(zip(ALL_MODULES, [*attention, (inner, hidden), (inner, hidden), (hidden, inner)], strict=True))

    def list_modules(self, names: Sequence[str] = ALL_MODULES) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of the named linear layers in all transformer layers, keyed by full name."""
        layers = range(self.num_hidden_layers)
        return {f"model.layers.{layer}.{_path(name)}": self.linears[name] for layer in layers for name in names}


LLAMA_8B = ModelShape(128256, 4096, 14336, 32, 32, 8, 128, 131072)
TINY = ModelShape(1024, 256, 512, 2, 4, 2, 64, 2048)


class Pool:
    """A pool of random bfloat16 numbers."""

    def __init__(self, largest: int) -> None:
        """Draw the numbers. `largest` is the number of elements in the largest tensor."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        numbers = torch.empty(largest + MAX_OFFSET, dtype=torch.bfloat16, device=device)
        self._bytes = bytes_of(numbers.normal_(0, STD, generator=generator).cpu())

    def take(self, choice: random.Random, shape: Sequence[int]) -> "Stored":
        start = choice.randrange(MAX_OFFSET)
        return Stored(tuple(shape), self._bytes[2 * start : 2 * (start + math.prod(shape))])


class Stored(NamedTuple):
    """A bfloat16 tensor's shape and bytes."""

    shape: tuple[int, ...]
    content: memoryview

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "Stored":
        return cls(tuple(tensor.shape), bytes_of(tensor.bfloat16().flatten()))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


@contextmanager
def scratch_folder(folder: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder, in memory if the machine has `/dev/shm` and no other folder is given."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="lorax-bench-", dir=folder or (memory if memory.is_dir() else None)
    ) as name:
        yield Path(name)


def make_model(folder: Path, shape: ModelShape, is_counting: bool = False) -> None:
    """Write a Llama model with its config, weight shards, and a tokenizer with a chat template.

    With `is_counting`, the most likely token after token `i` is always token `i + 1`, by a large margin.
    """
    pool, choice = Pool(shape.vocab_size * shape.hidden_size), random.Random(0)
    table, ones = (shape.vocab_size, shape.hidden_size), Stored.from_tensor(torch.ones(shape.hidden_size))
    tensors = {"model.embed_tokens.weight": pool.take(choice, table)}
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for module, sizes in shape.linears.items():
            tensors[f"{prefix}.{_path(module)}.weight"] = pool.take(choice, sizes)
        tensors[f"{prefix}.input_layernorm.weight"] = tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
    tensors |= {"model.norm.weight": ones, "lm_head.weight": pool.take(choice, table)}
    if is_counting:
        tensors |= _make_counting_vocabulary(tensors["model.embed_tokens.weight"])
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = min(8192, shape.max_position_embeddings // 8)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    write_model(folder, tensors.items(), config | shape._asdict())


def _make_counting_vocabulary(embedding: Stored) -> dict[str, Stored]:
    """Return an embedding whose values are far larger than the layers' outputs, and an LM head whose row for token
    `i + 1` is the embedding of token `i`.
    """
    rows = torch.frombuffer(embedding.content, dtype=torch.bfloat16).view(embedding.shape)
    scaled, shifted = Stored.from_tensor(rows * COUNTING_SCALE), Stored.from_tensor(rows.roll(1, 0))
    return {"model.embed_tokens.weight": scaled, "lm_head.weight": shifted}


def write_model(folder: Path, tensors: Iterable[tuple[str, Stored]], config: dict[str, Any]) -> None:
    """Write tensors in shards, the config with our tokenizer's end tokens, and the tokenizer."""
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
    bos = config["vocab_size"] - _num_special(config["vocab_size"])
    ends = {"bos_token_id": bos, "eos_token_id": bos + 1}
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends)
    write_tokenizer(folder, config["vocab_size"])


def make_adapters(folder: Path, shape: ModelShape, count: int, rank: int = 16) -> list[str]:
    """Write adapters for all modules to subfolders. Return the subfolder names."""
    return write_adapters(folder, shape.list_modules(), count, rank)


def write_adapters(folder: Path, linears: Linears, count: int, rank: int = 16) -> list[str]:
    """Write adapters for the given linear layers to subfolders. Return the subfolder names."""
    pool, names = _adapter_pool(linears, rank), [f"adapter-{i:03}" for i in range(count)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda i: _write_adapter(pool, folder / names[i], linears, i, rank, False), range(count)))
    return names


def make_adapter(
    folder: Path,
    shape: ModelShape,
    seed: int,
    rank: int = 16,
    modules: Sequence[str] = ALL_MODULES,
    use_dora: bool = False,
) -> None:
    """Write one adapter. Its weights depend on the seed and the rank."""
    linears = shape.list_modules(modules)
    _write_adapter(_adapter_pool(linears, rank), folder, linears, seed, rank, use_dora)


def _adapter_pool(linears: Linears, rank: int) -> Pool:
    return Pool(rank * max(max(sizes) for sizes in linears.values()))


def _write_adapter(pool: Pool, folder: Path, linears: Linears, seed: int, rank: int, use_dora: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    choice = random.Random(f"adapter {seed} {rank}")
    tensors: dict[str, Stored] = {}
    for name, (outputs, inputs) in linears.items():
        for factor, sizes in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = pool.take(choice, sizes)
        if use_dora:
            # About the norms of random rows, so that activations keep their size.
            generator = torch.Generator().manual_seed(choice.randrange(2**32))
            factors = 1 + 0.1 * (2 * torch.rand(outputs, generator=generator) - 1)
            magnitude = Stored.from_tensor(STD * math.sqrt(inputs) * factors)
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


def _path(module: str) -> str:
    return f"self_attn.{module}" if module in ATTENTION_MODULES else f"mlp.{module}"


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


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer: 256 bytes, then words, then special tokens.

    It has no merges, so a text becomes its bytes; only generated tokens are words. Texts are split into words first, as
    real tokenizers do, because `tokenizers` caches the last 10,000 words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    num_words = vocab_size - _num_special(vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + _spell(i) for i in range(num_words - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, *(f"<|reserved_special_token_{i}|>" for i in range(_num_special(vocab_size) - 2))]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    single, pair = f"{BOS} $A", f"{BOS} $A $B:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(BOS, num_words)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
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
    """Spell a number in at least two letters, because single letters are bytes."""
    letters = ""
    while number or len(letters) < 2:
        number, digit = divmod(number, 26)
        letters = chr(ord("a") + digit) + letters
    return letters


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))
