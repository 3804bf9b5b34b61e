"""Tiny random models for embeddings and classification, and an engine that runs token sequences through them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.types import AdapterRef, Pooled, Request, SamplingParams, StopParams

VOCAB = 100
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "initializer_range": 0.2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ENCODERS: dict[str, tuple[str, Any]] = {
    "bert": ("Bert", lambda **more: t.BertConfig(**SIZES, **more)),
    "distilbert": ("DistilBert", lambda **more: t.DistilBertConfig(**DISTILBERT, max_position_embeddings=64, **more)),
    "modernbert": (
        "ModernBert",
        lambda **more: t.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, local_attention=6, **more),
    ),
    "mpnet": ("MPNet", lambda **more: t.MPNetConfig(**SIZES, **more)),
    "nomic_bert": ("NomicBert", lambda **more: t.NomicBertConfig(**SIZES, **more)),
    "roberta": ("Roberta", lambda **more: t.RobertaConfig(**SIZES | {"pad_token_id": 1}, **more)),
    "xlm-roberta": ("XLMRoberta", lambda **more: t.XLMRobertaConfig(**SIZES | {"pad_token_id": 1}, **more)),
}
WORDS = (
    *("the", "a", "cat", "dog", "sat", "on", "mat", "paris", "john", "smith", "lives"),
    *("in", "likes", "no", "yes", "query", "document", "what", "is", "it", "and"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = [
    *("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    *WORDS,
    *(letter for letter in LETTERS if letter not in WORDS),
    *(f"##{letter}" for letter in LETTERS),
    *(".", ",", "!"),
]
KV: dict[str, Any] = {"num_key_value_heads": 2}
DECODERS: dict[str, tuple[str, Any]] = {
    "gemma2": ("Gemma2", lambda **more: t.Gemma2Config(**SIZES, **KV, head_dim=8, sliding_window=4, **more)),
    "llama": ("Llama", lambda **more: t.LlamaConfig(**SIZES, **KV, **more)),
    "mistral": ("Mistral", lambda **more: t.MistralConfig(**SIZES, **KV, sliding_window=4, **more)),
    "qwen2": ("Qwen2", lambda **more: t.Qwen2Config(**SIZES, **KV, **more)),
    "qwen3": ("Qwen3", lambda **more: t.Qwen3Config(**SIZES, **KV, head_dim=8, **more)),
}
MODELS = ENCODERS | DECODERS
LENGTHS = (5, 1, 17, 2, 33, 8, 64 - 4)


def make_model(name: str, head: str, folder: Path | None = None, **more: Any) -> Any:
    """Return a random model with the class suffix `head`, such as `Model`, and save it to `folder`."""
    prefix, make_config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(t, prefix + head)(make_config(**more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are not random by default
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, **settings: Any) -> Any:
    """Save a BERT tokenizer with lower-case words and letters, and return it."""
    assert len(TOKENS) <= VOCAB
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(TOKENS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ids = {"[CLS]": 1, "[SEP]": 2}
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    settings.setdefault("model_input_names", ["input_ids", "token_type_ids", "attention_mask"])
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, **names, **settings)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_transformer_folder(
    folder: Path, mode: str = "mean", *, prompts: dict[str, str] | None = None, normalize: bool = False
) -> None:
    """Add the files of sentence-transformers to a model folder."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *[("Normalize", "2_Normalize")] * normalize]
    described = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    pooling = {"word_embedding_dimension": SIZES["hidden_size"]}
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(described))
    config = pooling | {f"pooling_mode_{flag}": name == mode for name, flag in flags.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))


def make_sequences(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


class Text(NamedTuple):
    token_ids: Sequence[int]
    adapter: str = ""  # folder
    second_start: int = 0


class PooledEngine:
    """An engine for one model folder. Adapters are named by folder."""

    def __init__(self, folder: Path, task: str = "auto", *, roots: Sequence[Path] = (), **settings: Any) -> None:
        model = {key: settings.pop(key) for key in ("pooling", "embedding_dim", "dtype") if key in settings}
        config = ModelConfig(folder, task=task, **model)
        self.engine: Engine = build_engine(EngineConfig(config, sources=SourceConfig(tuple(roots)), **settings))
        self._ids = iter(range(1, 10**9))

    def run(self, texts: Sequence[Text]) -> list[npt.NDArray[np.float32]]:
        """Return the results of all texts, which are added together."""
        futures = {
            text.adapter: self.engine.resolve([AdapterRef("local", text.adapter)]) for text in texts if text.adapter
        }
        while not all(future.done() for future in futures.values()):
            self.engine.wait()
            self.engine.step()
        identities = {"": ""} | {name: future.result().identity for name, future in futures.items()}
        numbers = [next(self._ids) for _ in texts]
        for number, text in zip(numbers, texts, strict=True):
            stop = StopParams(max_new_tokens=1)
            identity = identities[text.adapter]
            request = Request(number, list(text.token_ids), SamplingParams(), stop, identity)
            self.engine.add(Request(**{**vars(request), "second_start": text.second_start}))
        results: dict[int, Pooled] = {}
        while self.engine.has_work:
            self.engine.wait()
            for output in self.engine.step():
                if output.failure is not None:
                    raise output.failure.to_error()
                assert output.pooled is not None
                results[output.request_id] = output.pooled
        return [np.frombuffer(results[n].data, np.float32).reshape(results[n].shape) for n in numbers]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "PooledEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
