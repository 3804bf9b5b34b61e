"""Small tokenizers of all types, trained on a few sentences, and random test texts."""

import codecs
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lorax_server.text.detokenizer import Detokenizer, Progress
from tests.optional import present

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog does not mind; it was there first.",
    "def answer(question: str) -> int:\n    return 42  # whatever it was\n\n\n",
    "Größe, Straße, naïveté, façade, señor: é is e with an accent, and 日本語 is written without spaces.",
    "привет мир, שלום עולם, مرحبا بالعالم, 你好世界, नमस्ते दुनिया, 👋🌍 and 👩‍👩‍👧‍👦",
    "    four spaces,  two spaces, a tab\tand 1234567890 digits ... !!! ??? <html></html>",
] * 4
BOS, EOS = "<s>", "</s>"
SPECIAL = ["<unk>", BOS, EOS]
UNKNOWN_ID = 1_000_000  # beyond every vocabulary here

# All Unicode planes in use, including joiners, combining marks, right-to-left text, spaces and controls.
RANGES = [
    *((0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x400, 0x4FF), (0x590, 0x5FF)),
    *((0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF)),
    *((0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0x10000, 0x100FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)),
    *((0x30000, 0x3134A), (0xE0100, 0xE01EF), (0xF0000, 0xF00FF), (0x10FF00, 0x10FFFD)),
]
PIECES = [
    *(" ", "  ", "\n", "\t", " the", "The", "dog", "▁", "<0x41>", "</w>", "##", "Ġ", "Ċ", "0", "\u200d", "é", "!"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "👍🏽", "🇪🇺", "\U0001d518"),
    *("שלום", "مرحبا", "\u202e", "日本語", "नमस्ते", "a\u0308\u0301\u0323", "e\u0301", "\U0010ffff"),
]


def random_texts(count: int, seed: int, max_pieces: int = 24) -> Iterator[str]:
    """Make texts from words, characters of all planes and unusual sequences, without U+FFFD."""
    rng = random.Random(seed)
    words = " ".join(CORPUS[:5]).split(" ")
    makers: list[Callable[[], str]] = [
        lambda: rng.choice(["", " "]) + rng.choice(words),
        lambda: chr(rng.randint(*rng.choice(RANGES))),
        lambda: rng.choice(PIECES),
    ]
    for _ in range(count):
        yield "".join([rng.choice(makers)() for _ in range(rng.randint(1, max_pieces))])


def stream(detokenizer: Detokenizer, ids: Sequence[int], ends: Iterable[int]) -> Iterator[tuple[Progress, str]]:
    """Feed `ids` up to each position in `ends`, starting with the prompt length. Yield progress and pending text."""
    ends = iter(ends)
    prefix, read = detokenizer.start(ids[: next(ends)])
    for end in ends:
        progress = detokenizer.advance(ids[:end], prefix, read)
        _, prefix, read = progress
        yield progress, detokenizer.pending(ids[:end], prefix, read)


def streamed(detokenizer: Detokenizer, ids: Sequence[int], ends: Iterable[int]) -> str:
    """Return the streamed text, including pending text."""
    steps = list(stream(detokenizer, ids, ends))
    return "".join([progress.text for progress, _ in steps]) + (steps[-1][1] if steps else "")


def random_ends(rng: random.Random, prompt: int, end: int) -> list[int]:
    """Draw random positions for `stream`, with one or more tokens per step."""
    return [prompt, *sorted(rng.sample(range(prompt + 1, end), rng.randint(0, max(0, end - prompt - 1)))), end]


class Kind(NamedTuple):
    """A tokenizer, its token bytes, and its rule for leading spaces."""

    tokenizer: Tokenizer
    bytes_of: Callable[[int], bytes]
    strip: Callable[[list[bytes]], list[bytes]] = list

    def token_id(self, token: str) -> int:
        return present(self.tokenizer.token_to_id(token))

    def joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.strip([piece for token_id in ids if (piece := self.bytes_of(token_id))]))


def decode_complete(spelled: bytes) -> str:
    """Decode bytes up to the last complete character."""
    return codecs.utf_8_decode(spelled, "replace", False)[0]


def check_each_step(detokenizer: Detokenizer, kind: Kind, ids: Sequence[int], prompt: int) -> None:
    """Check after each token that exactly the text that cannot change any more has been streamed."""
    before, text = decode_complete(kind.joined(ids[:prompt])), ""
    for end, (progress, pending) in enumerate(stream(detokenizer, ids, range(prompt, len(ids) + 1)), prompt + 1):
        text += progress.text
        spelled = kind.joined(ids[:end])
        assert before + text == decode_complete(spelled)
        assert before + text + pending == spelled.decode(errors="replace")


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def _names(tokenizer: Tokenizer) -> dict[int, str]:
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return {token_id: name for name, token_id in tokenizer.get_vocab().items() if token_id not in special}


@cache
def byte_level(vocab_size: int = 600) -> Kind:
    """Make a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    names, byte_of = _names(_with_special(tokenizer)), {name: byte for byte, name in bytes_to_unicode().items()}
    return Kind(tokenizer, lambda i: bytes([byte_of[c] for c in names.get(i, "")]))


def _sentencepiece_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    table = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    names = _names(tokenizer)

    def bytes_of(token_id: int) -> bytes:
        name = names.get(token_id, "")
        return table.get(name) or name.replace("▁", " ").encode()

    return bytes_of


@cache
def sentencepiece(strip: bool = True) -> Kind:
    """Make a BPE tokenizer with byte fallback, as in Llama 2 and Mistral, or as in Gemma without `strip`."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator([sentence[:60] for sentence in CORPUS], trainer)
    state = json.loads(trained.to_str())["model"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    merges = [tuple(pair) for pair in state["merges"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
        spaces.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    bytes_of = _sentencepiece_bytes(_with_special(tokenizer))
    return Kind(tokenizer, bytes_of, _without_a_space if strip else list)


def _without_a_space(pieces: list[bytes]) -> list[bytes]:
    joined = b"".join(pieces)
    return [joined[1:] if joined[:1] == b" " else joined]


@cache
def metaspace(prepend_scheme: str = "always") -> Kind:
    """Make a Unigram tokenizer, as in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    names = _names(_with_special(tokenizer))
    strip = list if prepend_scheme == "never" else _without_first_spaces
    return Kind(tokenizer, lambda i: names.get(i, "").replace("▁", " ").encode(), strip)


def _without_first_spaces(pieces: list[bytes]) -> list[bytes]:
    return [piece if i else piece.replace(b" ", b"") for i, piece in enumerate(pieces)]


BYTE_KINDS: dict[str, Callable[[], Kind]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece-no-strip": lambda: sentencepiece(strip=False),
    "metaspace-always": metaspace,
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-never": lambda: metaspace("never"),
}


# --- Tokenizers whose token text depends on adjacent tokens -----------------------------------------------------------


@cache
def word_piece() -> Tokenizer:
    """Make a tokenizer as in BERT, without decoder cleanup, which would change text that was already streamed."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_special(tokenizer)


@cache
def word_ends() -> Tokenizer:
    """Make a BPE tokenizer with end-of-word suffixes, as in the first GPT and CLIP."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_special(tokenizer)


@cache
def words() -> Tokenizer:
    """Make a word-level tokenizer without a decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return _with_special(tokenizer)


class PythonTokenizer(PreTrainedTokenizer):
    """A slow tokenizer whose tokens are all single bytes and some byte pairs that split characters."""

    PAIRS = (b"th", b"e ", b" \xe6", b"a\xc3", b"\xa9b", b"\xf0\x9f", b"\x98\x80", b"\x80x", b"\xe2\x80")

    def __init__(self, **kwargs: Any) -> None:
        self._pieces = [*(bytes([byte]) for byte in range(256)), *self.PAIRS]
        self._ids = {piece.decode("latin-1"): i for i, piece in enumerate(self._pieces)}
        super().__init__(bos_token=BOS, eos_token=EOS, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        rest, tokens = text.encode().decode("latin-1"), []
        while rest:
            tokens.append(rest[:2] if rest[:2] in self._ids else rest[:1])
            rest = rest[len(tokens[-1]) :]
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index].decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).encode("latin-1").decode(errors="replace")


OTHER_KINDS: dict[str, Callable[[], Any]] = {
    "word-piece": word_piece,
    "word-ends": word_ends,
    "words": words,
    "python": cache(PythonTokenizer),
}
