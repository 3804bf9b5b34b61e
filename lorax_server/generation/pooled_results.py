"""Convert pooled results to embeddings, labels, entities and scores, and write the texts that a model judges."""

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from lorax_server.errors import ContextLengthError, InputError
from lorax_server.pooling import SCORE, TOKEN_CLASSIFY, PoolingConfig
from lorax_server.text.tokenizer import EncodedText, TextTokenizer
from lorax_server.types import Pooled

OUTSIDE_LABEL = "O"
SLICE_CHARACTERS, SLICE_INPUTS = 2**16, 64  # tokenized together; tokenizing needs hundreds of bytes per character
# Qwen3-Reranker's prompt.
SCORE_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
)
SCORE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SCORE_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class LabelScore(NamedTuple):
    label: str
    score: float


class Entity(NamedTuple):
    """Consecutive tokens with the same label, named as in transformers."""

    entity_group: str
    score: float  # mean over its tokens
    word: str
    start: int  # character range in the text
    end: int


# --- Inputs -----------------------------------------------------------------------------------------------------------


def find_prompt(config: PoolingConfig, prompt_name: str | None = None) -> str:
    """Return the text that is put before each input."""
    name = prompt_name or config.default_prompt
    if name is not None and name not in config.prompts:
        names = ", ".join(sorted(config.prompts)) or "none"
        raise InputError(f"`prompt_name` {name[:100]!r} is unknown; this model's prompts: {names}")
    return "" if name is None else config.prompts[name]


def prepare_text(prompt: str, text: str, config: PoolingConfig) -> str:
    """Return a text in the form that the model expects, including its prompt."""
    return (prompt + text).lower() if config.lower_case else prompt + text


def prepare_pair(query: str, document: str, config: PoolingConfig, instruction: str | None = None) -> Any:
    """Return the text or pair of texts with which a model judges a document."""
    if config.task != SCORE:
        if instruction is not None:
            raise InputError("`instruction` has no effect on this model; it is only for --task score")
        return query, document
    values = {"query": query, "document": document, "instruction": instruction or SCORE_INSTRUCTION}
    parts = SCORE_PROMPT.replace("{", "\0{").replace("}", "}\0").split("\0")
    return "".join(values[part[1:-1]] if part.startswith("{") else part for part in parts) + SCORE_SUFFIX


def slice_inputs(sizes: Sequence[int]) -> list[slice]:
    """Divide inputs into slices of limited size, given their numbers of characters. A slice contains at least one
    input.
    """
    slices, start, total = list[slice](), 0, 0
    for index, size in enumerate(sizes):
        if index > start and (total + size > SLICE_CHARACTERS or index - start == SLICE_INPUTS):
            slices.append(slice(start, index))
            start, total = index, 0
        total += size
    return [*slices, slice(start, len(sizes))]


def encode_inputs(
    tokenizer: TextTokenizer, texts: Sequence[Any], config: PoolingConfig, limit: int, truncate: bool
) -> list[EncodedText]:
    """Return the tokens of texts or pairs of texts, with at most `limit` tokens each. Raise if a text is too long,
    unless `truncate` is set.
    """
    if not truncate:  # before tokenizing, which is slow for long texts
        for text in texts:
            parts = [text] if isinstance(text, str) else text
            check_length(sum(map(tokenizer.min_token_count, parts)), limit, "at least ")
    suffix = SCORE_SUFFIX if config.task == SCORE else ""
    with_spans = config.task == TOKEN_CLASSIFY
    encoded = tokenizer.encode_texts(texts, limit, truncate=truncate, suffix=suffix, with_spans=with_spans)
    check_length(max((len(each.ids) for each in encoded), default=0), limit)
    return encoded if config.has_token_types else [each._replace(second_start=0) for each in encoded]


def check_length(count: int, limit: int, prefix: str = "") -> None:
    if count > limit:
        raise ContextLengthError(
            f"`inputs` must have at most {limit} tokens. Given: {prefix}{count}; set `truncate` to keep the beginning"
        )


# --- Results ----------------------------------------------------------------------------------------------------------


def read_values(pooled: Pooled) -> "array[float]":
    values = array("f")
    values.frombytes(pooled.data)
    return values


def to_embedding(pooled: Pooled, config: PoolingConfig, dimensions: int | None = None) -> "array[float]":
    """Return an embedding, truncated to `dimensions` (Matryoshka embeddings). Normalized embeddings stay normalized."""
    values = read_values(pooled)
    count = dimensions or config.dimensions
    if count is None or count == len(values):
        return values
    if count > len(values):
        raise InputError(f"`dimensions` must be at most {len(values)} for this model (got {count})")
    values = values[:count]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]) if config.normalizes and length else values


def to_base64(values: "array[float]") -> str:
    return base64.b64encode(values.tobytes()).decode()


def to_labels(pooled: Pooled, config: PoolingConfig) -> list[LabelScore]:
    """Return a score for each label, in the order of the labels."""
    logits = _require_head(read_values(pooled))
    kind = config.activation or ("softmax" if len(logits) > 1 else "sigmoid")
    scores = softmax(logits) if kind == "softmax" else [sigmoid(x) if kind == "sigmoid" else x for x in logits]
    return list(map(LabelScore, find_labels(len(logits), config), scores))


def to_score(pooled: Pooled, config: PoolingConfig) -> float:
    """Return the relevance score of a pair of texts."""
    logits = _require_head(read_values(pooled))
    if len(logits) != 1:
        raise InputError(f"the model has {len(logits)} labels, but scores need a model or adapter with one output")
    return sigmoid(logits[0]) if config.score_activation == "sigmoid" else logits[0]


def to_entities(pooled: Pooled, config: PoolingConfig, text: str, encoded: EncodedText) -> list[Entity]:
    """Group tokens into entities, like transformers with `aggregation_strategy="simple"`."""
    _, size = pooled.shape
    _require_head(range(size))
    values, labels = read_values(pooled), find_labels(size, config)
    groups: list[tuple[str, list[float], list[int]]] = []  # label, scores, character positions
    last = ("", "")
    for index, (start, end) in enumerate(encoded.spans):
        if encoded.is_special[index]:
            continue
        scores = softmax(values[index * size : (index + 1) * size])
        best = max(range(size), key=scores.__getitem__)
        prefix, tag = _split_label(labels[best])
        if groups and tag == last[1] and prefix != "B":
            groups[-1][1].append(scores[best])
            groups[-1][2].append(end)
        else:
            groups.append((labels[best], [scores[best]], [start, end]))
        last = prefix, tag
    return [
        Entity(
            label.split("-", 1)[-1],
            sum(scores) / len(scores),
            text[positions[0] : positions[-1]],
            positions[0],
            positions[-1],
        )
        for label, scores, positions in groups
        if label.split("-", 1)[-1] != OUTSIDE_LABEL
    ]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(float.__mul__, first, second)) / lengths if lengths else 0.0


def find_labels(count: int, config: PoolingConfig) -> Sequence[str]:
    """Return the base model's label names, or numbered names for an adapter with another number of labels."""
    return config.labels if count == len(config.labels) else [f"LABEL_{index}" for index in range(count)]


def softmax(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    exponentials = [math.exp(logit - highest) for logit in logits]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _split_label(label: str) -> tuple[str, str]:
    prefix, _, tag = label.partition("-")
    return (prefix, tag) if prefix in ("B", "I") and tag else ("I", label)


def _require_head(logits: Any) -> Any:
    if not len(logits):
        raise InputError("the base model has no classification head; request an adapter that has one")
    return logits
