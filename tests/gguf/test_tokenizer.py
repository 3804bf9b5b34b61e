"""Tokenizers from GGUF metadata match transformers. Differences were compared with llama.cpp's `llama_tokenize`."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from lorax_server.errors import ConfigError, WeightsError
from lorax_server.gguf.container import read_gguf
from lorax_server.gguf.tokenizer import PRE_TOKENIZERS, GGUFTokenizer, make_tokenizer
from tests.gguf.writer import save

DOCS = Path(__file__).parents[2] / "docs"
OTHER_TEXTS = (
    "日本語 のテキスト です。",
    "naïve café Größe ñandú",
    "1234567 89 10 2024-01-02",
    "a  double   space\n\n\n b\t",
)
END, THINK = "<|im_end|>", "<think>"
TEXTS = [
    *(
        "Hello world",
        "  two  spaces   12345 and 1 2  3",
        "def f(x):\n    return x+1\n\t\tif y: pass\n",
        "don't I'LL we'Ve",
    ),
    *(
        "日本語 text Größe é e\u0301 👍🏽 🤖",
        " leading",
        " ",
        "",
        "\n\n\n x",
        "x\r\ny",
        "....!!!???   ",
        "<s>",
        "1,000,000.50",
    ),
    *(f"{END}hi {END} there{THINK}", "¿Qué? مرحبا बालعालم", "\u00a0no\u2003break", "▁x ▁ y", f" {END} a"),
]
PARTS = ("a", "B", " ", "  ", "1", "23", "\n", "é", "日", "_", "-", "'s", " the", "\t", "!", "👍", "²", "٣", END, THINK)
TEXTS += ["".join(random.Random(seed).choices(PARTS, k=1 + seed % 12)) for seed in range(200)]


class Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]


def train(pre_tokenizer: Any, **options: Any) -> dict[str, Any]:
    corpus = [*(path.read_text() for path in sorted(DOCS.glob("*.md"))), *OTHER_TEXTS * 50]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1500, show_progress=False, **options))
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


@cache
def train_byte_level() -> Vocabulary:
    model = train(pre_tokenizers.ByteLevel(False), initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), END, THINK]
    return Vocabulary(tokens, [1] * (len(tokens) - 2) + [3, 4], [" ".join(pair) for pair in model["merges"]], [])


@cache
def train_sentencepiece() -> Vocabulary:
    model = train(pre_tokenizers.Metaspace())
    merged = ["".join(pair) for pair in model["merges"]]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    normal = [*merged, *(token for token in model["vocab"] if len(token) == 1), "▁▁", "▁▁▁"]
    ranks = {token: -float(rank) for rank, token in enumerate(merged)}
    scores = [0.0] * len(first) + [ranks.get(token, -1e4) for token in normal]
    types = [2, 3, 3] + [6] * 256 + [1] * len(normal)
    return Vocabulary([*first, *normal, END, THINK], [*types, 3, 4], [], [*scores, -1e3, -1e3])


def write(
    path: Path, architecture: str, vocabulary: Vocabulary, *, pre: str = "default", change: Callable[[Any], object] = id
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for add in (writer.add_block_count, writer.add_head_count, writer.add_embedding_length, writer.add_context_length):
        add(1)
    writer.add_tokenizer_model("gpt2" if vocabulary.merges else "llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
        writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    change(writer)
    save(writer)


def load(path: Path, *args: Any, **options: Any) -> GGUFTokenizer:
    write(path, *args, **options)
    return make_tokenizer(read_gguf(path))


def check_same_ids(ours: Tokenizer, theirs: Any, texts: Sequence[str] = TEXTS) -> None:
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"])
def test_byte_level_ids_match_transformers(pre: str, tmp_path: Path) -> None:
    ours = load(tmp_path / "a.gguf", "qwen2" if pre == "qwen2" else "llama", train_byte_level(), pre=pre)
    check_same_ids(ours.backend, AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf"))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_sentencepiece_ids_match_transformers(architecture: str, tmp_path: Path) -> None:
    ours = load(tmp_path / "a.gguf", architecture, train_sentencepiece())
    check_same_ids(ours.backend, AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf"))


def test_single_digit_pre_tokenizer_matches_original_tokenizer(tmp_path: Path) -> None:
    """SmolLM2's original tokenizer splits off digits. transformers does not, and differs for spaces before digits."""
    vocabulary = train_byte_level()
    ours = load(tmp_path / "a.gguf", "llama", vocabulary, pre="smollm").backend
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    original = Tokenizer(models.BPE(ids, [(merge.split()[0], merge.split()[1]) for merge in vocabulary.merges]))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        if END not in text and THINK not in text:
            assert ours.encode(text).ids == original.encode(text).ids, text
    assert ours.encode("a  1").tokens == ["a", "ĠĠ", "1"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", "Hi|,| x|_|1|2|3|4| don|'|t|\n|\n|  |日本語カナ| |안녕| Gr|öß|e| |ა| «|q|»| $|5|.|0|0|  "),
        ("deepseek-coder", "Hi|,| x|_|1|2|3|4| don|'|t|\n|\n| | |日本語カナ| |안녕| Größe| |ა| «|q|»| $|5|.|0|0|  "),
        ("deepseek-v3", "Hi|,| x|_|123|4| don|'t|\n\n|  |日本語カナ| 안녕| Größe| ა| «|q|»| $|5|.|00|  "),
    ],
)
def test_deepseek_words(pre: str, words: str, tmp_path: Path) -> None:
    """The patterns are the same as in llama.cpp. The punctuation pattern of `deepseek-llm` contains ASCII letters."""
    backend, text = load(tmp_path / "a.gguf", "deepseek2", train_byte_level(), pre=pre).backend, words.replace("|", "")
    assert [text[slice(*place)] for _, place in backend.pre_tokenizer.pre_tokenize_str(text)] == words.split("|")


def test_words_in_vocabulary_need_no_merges(tmp_path: Path) -> None:
    """As in Llama 3: transformers applies merges to them."""
    vocabulary = Vocabulary(["Ġ", "a", "b", "c", "abc", "ab"], [1] * 6, ["a b"], [])
    assert load(tmp_path / "a.gguf", "llama", vocabulary, pre="gpt-2").backend.encode("abc").tokens == ["ab", "c"]
    ours = load(tmp_path / "b.gguf", "llama", vocabulary, pre="llama-bpe", change=lambda w: w.add_add_bos_token(False))
    assert ours.backend.encode("abc").tokens == ["abc"]


@pytest.mark.parametrize(
    ("pre", "flags", "added"),
    [
        ("gpt-2", {}, ""),
        ("gpt-2", {"bos": True, "eos": True}, "be"),
        ("llama-bpe", {}, "b"),
        ("llama-bpe", {"bos": False}, ""),
        ("tekken", {}, "b"),
        ("", {}, "b"),
        ("", {"bos": False, "eos": True}, "e"),
    ],
)
def test_bos_and_eos_are_added_as_in_llama_cpp(pre: str, flags: dict[str, bool], added: str, tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)

    vocabulary = train_byte_level() if pre else train_sentencepiece()
    ours = load(tmp_path / "a.gguf", "llama", vocabulary, pre=pre or "default", change=change).backend
    plain = ours.encode("text", add_special_tokens=False).ids
    assert ours.encode("text").ids == [1] * ("b" in added) + plain + [2] * ("e" in added)


def test_space_prefix_is_optional(tmp_path: Path) -> None:
    vocabulary = train_sentencepiece()
    with_space = load(tmp_path / "a.gguf", "llama", vocabulary).backend
    without = load(tmp_path / "b.gguf", "llama", vocabulary, change=lambda w: w.add_add_space_prefix(False)).backend
    assert with_space.encode("the", add_special_tokens=False).tokens == ["▁the"]
    assert "▁" not in "".join(without.encode("the", add_special_tokens=False).tokens)
    assert without.decode(without.encode(" the").ids) == " the"


def test_control_tokens_with_any_characters_are_special(tmp_path: Path) -> None:
    """DeepSeek's control tokens are not in the byte-level alphabet."""
    vocabulary = Vocabulary(["a", "<\uff5cend▁of▁sentence\uff5c>", "<think>"], [1, 3, 4], ["a a"], [])._replace(
        merges=["a a"]
    )
    vocabulary.tokens.append("aa")
    ours = load(tmp_path / "a.gguf", "llama", vocabulary._replace(types=[1, 3, 4, 1]), pre="gpt-2").backend
    ids = ours.encode("a<\uff5cend▁of▁sentence\uff5c><think>").ids
    assert ids == [0, 1, 2]
    assert ours.decode(ids, skip_special_tokens=True) == "a<think>"


def test_special_tokens_chat_templates_and_eos_tokens_are_read(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_chat_template(
            [{"name": "default", "template": "{{ one }}"}, {"name": "tool_use", "template": "two"}]
        )
        writer.add_eot_token_id(5)

    vocabulary = train_sentencepiece()
    ours = load(tmp_path / "a.gguf", "llama", vocabulary, change=change)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert {name: ours.config[name] for name in names} == names
    templates = {each["name"]: each["template"] for each in ours.config["chat_template"]}
    assert templates == {"default": "{{ one }}", "tool_use": "two"}
    assert ours.end_token_ids == [2, 5, vocabulary.tokens.index(END)]


def test_invalid_tokenizers_are_rejected(tmp_path: Path) -> None:
    vocabulary, path = train_byte_level(), tmp_path / "a.gguf"
    cases: list[tuple[str, Callable[[], object]]] = [
        (
            "pre = 'unknown' is not supported; use one of chatglm-bpe, ",
            lambda: load(path, "llama", vocabulary, pre="unknown"),
        ),
        ("convert the model again", lambda: load(path, "llama", vocabulary)),
        ("the tokenizer is invalid: ", lambda: load(path, "llama", vocabulary._replace(merges=["zzz q"]), pre="gpt-2")),
        ("has 3 entries, expected", lambda: load(path, "llama", vocabulary._replace(types=[1] * 3), pre="gpt-2")),
        (
            "bos_token_id = 1 is not in the vocabulary",
            lambda: load(path, "llama", Vocabulary(["a"], [1], ["a a"], []), pre="gpt-2"),
        ),
        (
            "tokenizer 'bert' is not supported; use gpt2 or llama",
            lambda: load(path, "bert", vocabulary, change=lambda w: w.add_tokenizer_model("bert"), pre="gpt-2"),
        ),
        ("contains no tokenizer", lambda: load(path, "llama", Vocabulary([], [], ["a a"], []), pre="gpt-2")),
    ]
    for message, run in cases:
        with pytest.raises((ConfigError, WeightsError), match=message):
            run()


def test_every_pre_tokenizer_is_a_valid_pattern(tmp_path: Path) -> None:
    for number, pre in enumerate(PRE_TOKENIZERS):
        ours = load(tmp_path / f"{number}.gguf", "llama", train_byte_level(), pre=pre).backend
        text = "It's 12345  ÜBER-größe\r\n\t日本語!"
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False).endswith(text)
