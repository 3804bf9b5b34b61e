"""Text streamed token by token equals the text of all tokens decoded together, also for invalid UTF-8."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lorax_server.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from tests.grids import slow_except
from tests.optional import present
from tests.text.tokenizers import (
    BOS,
    BYTE_KINDS,
    EOS,
    OTHER_KINDS,
    UNKNOWN_ID,
    PythonTokenizer,
    byte_level,
    check_each_step,
    decode_complete,
    metaspace,
    random_ends,
    random_texts,
    sentencepiece,
    stream,
    streamed,
    word_piece,
    words,
)

FAST_KINDS = ("byte-level", "metaspace-always")
NUM_TEXTS = 1000
# Tokenizers with byte tokens, which can split a character and produce invalid UTF-8.
WITH_BYTES = ["byte-level", "sentencepiece", "sentencepiece-no-strip"]
INVALID_UTF8 = [
    *(b"\x80", b"\xff", b"\xc0\x80", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xf4\x90\x80\x80"),
    *(b"\xe0\x80\xaf", b"\xf0\x80\x80\x80", b"\xc3\xc3\xa9", b"\xe2\xe2\x82\xac", b"\xf0\x9f\xf0\x9f\x98\x80"),
]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


# --- Byte tokenizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_byte_tokenizers_are_detected(name: str) -> None:
    tokenizer = BYTE_KINDS[name]().tokenizer
    assert isinstance(make_detokenizer(tokenizer), ByteDetokenizer)
    assert isinstance(make_detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer)), ByteDetokenizer)


@pytest.mark.parametrize("name", slow_except(FAST_KINDS, BYTE_KINDS))
def test_streamed_text_equals_decoded_text(name: str) -> None:
    kind, rng, within = BYTE_KINDS[name](), random.Random(1), 0
    for text in random_texts(NUM_TEXTS, seed=0):
        ids = encode(kind.tokenizer, text)
        assert kind.joined(ids).decode() == decode(kind.tokenizer, ids)  # the reference for the next checks
        prompt = rng.randint(0, len(ids))
        check_each_step(make_detokenizer(kind.tokenizer), kind, ids, prompt)
        within += decode_complete(kind.joined(ids[:prompt])) != kind.joined(ids[:prompt]).decode(errors="replace")
    assert (within > 50) == (name in WITH_BYTES)  # many prompts stop within a character


@pytest.mark.parametrize("name", slow_except(FAST_KINDS, BYTE_KINDS))
def test_prompt_and_streamed_text_add_up(name: str) -> None:
    kind, rng = BYTE_KINDS[name](), random.Random(2)
    detokenizer = make_detokenizer(kind.tokenizer)
    for text in random_texts(NUM_TEXTS, seed=3):
        ids = encode(kind.tokenizer, text)
        prompt = rng.randint(0, len(ids))
        whole, before = decode(kind.tokenizer, ids), decode(kind.tokenizer, ids[:prompt])
        generated = streamed(detokenizer, ids, range(prompt, len(ids) + 1))
        if before.endswith("\ufffd"):  # the completion contains the split character
            assert whole.endswith(generated)
            assert not generated or whole[: -len(generated)] == decode_complete(kind.joined(ids[:prompt]))
        else:
            assert before + generated == whole


@pytest.mark.parametrize("name", slow_except(FAST_KINDS, BYTE_KINDS))
def test_multi_token_steps_stream_the_same_text(name: str) -> None:
    kind, rng = BYTE_KINDS[name](), random.Random(4)
    detokenizer = make_detokenizer(kind.tokenizer)
    for text in random_texts(NUM_TEXTS // 2, seed=5):
        ids = encode(kind.tokenizer, text)
        prompt = rng.randint(0, len(ids) - 1)
        one_by_one = streamed(detokenizer, ids, range(prompt, len(ids) + 1))
        assert streamed(detokenizer, ids, [prompt, len(ids)]) == one_by_one
        assert streamed(detokenizer, ids, random_ends(rng, prompt, len(ids))) == one_by_one


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_random_token_sequences_stream_correctly(name: str) -> None:
    """Mix special tokens, unknown ids and invalid bytes."""
    kind, rng = BYTE_KINDS[name](), random.Random(6)
    size = kind.tokenizer.get_vocab_size()
    for _ in range(NUM_TEXTS // 2):
        ids = [rng.choice([rng.randrange(size), rng.randrange(300), UNKNOWN_ID]) for _ in range(rng.randint(1, 12))]
        check_each_step(make_detokenizer(kind.tokenizer), kind, ids, rng.randint(0, len(ids)))


@pytest.mark.parametrize("name", WITH_BYTES)
def test_invalid_utf8_is_replaced(name: str) -> None:
    kind, rng = BYTE_KINDS[name](), random.Random(7)
    token = {kind.bytes_of(i): i for i in reversed(range(kind.tokenizer.get_vocab_size()))}
    spellings = [a + bad + b for bad in INVALID_UTF8 for a in (b"", b"x", b"\xc3\xa9") for b in (b"", b"x")]
    spellings += [rng.randbytes(rng.randint(1, 10)) for _ in range(NUM_TEXTS)]
    # Only lead and continuation bytes, which are harder cases.
    spellings += [bytes(rng.choices(b"a\x80\xbf\xc3\xe2\xed\xf0\xf4\x90\x9f", k=8)) for _ in range(NUM_TEXTS)]
    for spelled in spellings:
        ids = [token[bytes([byte])] for byte in spelled]
        check_each_step(make_detokenizer(kind.tokenizer), kind, ids, rng.randint(0, len(ids)))
        if name == "byte-level":
            assert decode(kind.tokenizer, ids) == spelled.decode(errors="replace")


def test_valid_characters_near_invalid_bytes_are_kept() -> None:
    """`tokenizers` would replace the whole run of bytes, although its first character was already streamed."""
    kind = sentencepiece(strip=False)
    ids = [kind.token_id(name) for name in ("<0xC3>", "<0xA9>", "<0xFF>", "<0xC3>", "<0xA9>")]
    assert decode(kind.tokenizer, ids) == "\ufffd" * 5
    assert streamed(make_detokenizer(kind.tokenizer), ids, range(6)) == "é\ufffdé"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=12), st.data())
def test_random_bytes_stream_correctly(spelled: bytes, data: st.DataObject) -> None:
    kind = byte_level()
    token = {kind.bytes_of(i): i for i in range(kind.tokenizer.get_vocab_size())}
    ids, prompt = [token[bytes([byte])] for byte in spelled], data.draw(st.integers(0, len(spelled)))
    check_each_step(make_detokenizer(kind.tokenizer), kind, ids, prompt)


@pytest.mark.parametrize("name", slow_except(FAST_KINDS, BYTE_KINDS))
def test_special_and_unknown_tokens_add_no_text(name: str) -> None:
    kind, rng = BYTE_KINDS[name](), random.Random(8)
    detokenizer, skipped = make_detokenizer(kind.tokenizer), [kind.token_id(EOS), UNKNOWN_ID]
    for text in random_texts(NUM_TEXTS // 4, seed=9):
        ids = encode(kind.tokenizer, text)
        mixed = [t for token_id in ids for t in (*rng.choices(skipped, k=rng.randint(0, 3)), token_id)] + skipped
        assert streamed(detokenizer, mixed, range(len(mixed) + 1)) == decode(kind.tokenizer, ids)
    assert [detokenizer.advance([t], 0, 0).text for t in skipped] == ["", ""]


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_leading_space_is_kept_only_after_text(name: str) -> None:
    kind = BYTE_KINDS[name]()
    detokenizer, (bos, eos) = make_detokenizer(kind.tokenizer), map(kind.token_id, (BOS, EOS))
    the = min(i for i in range(kind.tokenizer.get_vocab_size()) if kind.bytes_of(i).startswith(b" t"))
    text = kind.bytes_of(the).decode()
    for prompt in ([], [bos], [bos] * 9, [UNKNOWN_ID]):
        ids = [*prompt, eos, the, eos, the]
        assert streamed(detokenizer, ids, range(len(prompt), len(ids) + 1)) == decode(kind.tokenizer, ids)
    assert streamed(detokenizer, [the, *[eos] * 9, the], [1, *range(2, 12)]) == text


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_non_special_added_tokens_are_text(name: str) -> None:
    kind = BYTE_KINDS[name]()
    call, detokenizer = kind.token_id("<tool_call>"), make_detokenizer(kind.tokenizer)
    assert streamed(detokenizer, [call, call], [1, 2]) == detokenizer.token_text(call) == "<tool_call>"


def test_added_tokens_decode_as_in_tokenizers() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ã": 1, "©": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name) for name in ("é", "<｜fim▁hole｜>", "a b", "日本")])  # noqa: RUF001
    rng, detokenizer = random.Random(10), make_detokenizer(tokenizer)
    for _ in range(200):
        ids = rng.choices(range(7), k=5)
        assert streamed(detokenizer, ids, range(6)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["<0x 1>", "<0x+1>", "<0x1_>", "<0xGG>", "<0x１２>", "<0x>", "<0x123>", "0x41"])  # noqa: RUF001
def test_malformed_byte_token_is_text(name: str) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={name: 0, "<0x41>": 1, "<0xe9>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert streamed(make_detokenizer(tokenizer), [1, 0, 1], range(4)) == f"A{name}A"


def test_lowercase_byte_token_is_a_byte() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0xc3>": 0, "<0xa9>": 1}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert streamed(make_detokenizer(tokenizer), [0, 1], range(3)) == tokenizer.decode([0, 1]) == "é"


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_wrapped_tokenizer_streams_the_same_text(name: str) -> None:
    kind = BYTE_KINDS[name]()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=kind.tokenizer, bos_token=BOS, eos_token=EOS)
    detokenizer = make_detokenizer(wrapped)
    for text in random_texts(100, seed=11):
        ids = [wrapped.bos_token_id, *encode(wrapped, text), wrapped.eos_token_id]
        generated = streamed(detokenizer, ids, range(1, len(ids) + 1))
        assert generated == wrapped.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_special_token_added_by_transformers_is_skipped() -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level().tokenizer.to_str()))
    wrapped.add_special_tokens({"pad_token": "<pad>"})
    detokenizer = make_detokenizer(wrapped)
    assert detokenizer.is_special(wrapped.pad_token_id)
    assert not detokenizer.is_special(encode(wrapped, "a")[0])
    assert streamed(detokenizer, [wrapped.pad_token_id], [0, 1]) == ""
    assert detokenizer.token_text(wrapped.pad_token_id) == "<pad>"


def test_token_text_keeps_space_and_replaces_incomplete_bytes() -> None:
    kind = sentencepiece()
    detokenizer = make_detokenizer(kind.tokenizer)
    assert detokenizer.token_text(kind.token_id("▁the")) == " the"
    assert detokenizer.token_text(kind.token_id("<0xC3>")) == "\ufffd"
    assert detokenizer.token_text(kind.token_id(EOS)) == EOS
    assert detokenizer.token_text(UNKNOWN_ID) == ""
    assert not detokenizer.is_special(UNKNOWN_ID)


# --- Other tokenizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_tokenizers_without_bytes_use_window_detokenizer(name: str) -> None:
    assert isinstance(make_detokenizer(OTHER_KINDS[name]()), WindowDetokenizer)


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_window_streams_decoded_text(name: str) -> None:
    tokenizer, rng = OTHER_KINDS[name](), random.Random(12)
    detokenizer = make_detokenizer(tokenizer)
    for text in random_texts(NUM_TEXTS, seed=13, max_pieces=12):
        ids = encode(tokenizer, text)
        prompt = rng.randint(0, len(ids))
        whole, before = decode(tokenizer, ids), decode(tokenizer, ids[:prompt]).rstrip("\ufffd")
        assert before + streamed(detokenizer, ids, range(prompt, len(ids) + 1)) == (whole if ids[prompt:] else before)
        assert before + streamed(detokenizer, ids, random_ends(rng, prompt, len(ids) + 1)) == whole


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_window_detokenizer_never_retracts_text(name: str) -> None:
    tokenizer = OTHER_KINDS[name]()
    for text in random_texts(NUM_TEXTS // 4, seed=14, max_pieces=12):
        ids = encode(tokenizer, text)
        whole, so_far = decode(tokenizer, ids), ""
        for progress, pending in stream(make_detokenizer(tokenizer), ids, range(len(ids) + 1)):
            so_far += progress.text
            assert whole.startswith(so_far)
            assert whole.startswith((so_far + pending).rstrip("\ufffd"))


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_window_skips_special_and_unknown_tokens(name: str) -> None:
    tokenizer, rng = OTHER_KINDS[name](), random.Random(15)
    special = getattr(tokenizer, "eos_token_id", None) or tokenizer.token_to_id(EOS)
    detokenizer, skipped = make_detokenizer(tokenizer), [special, UNKNOWN_ID]
    for text in random_texts(NUM_TEXTS // 4, seed=16, max_pieces=6):
        ids = encode(tokenizer, text)
        mixed = [t for token_id in ids for t in (*rng.choices(skipped, k=rng.randint(0, 3)), token_id)] + skipped
        assert streamed(detokenizer, mixed, range(len(mixed) + 1)) == decode(tokenizer, ids)
    assert detokenizer.is_special(special)
    assert detokenizer.token_text(special) == EOS


def test_window_holds_back_only_incomplete_character() -> None:
    """If the last of several tokens is an incomplete character, the text before it is still emitted."""
    tokenizer = PythonTokenizer()
    detokenizer, ids = make_detokenizer(tokenizer), [*b"many tokens \xe2\x82\xac"]
    assert [progress.text for progress, _ in stream(detokenizer, ids, [0, 13, 14, 15])] == ["many tokens ", "", "€"]


def test_window_emits_invalid_bytes_after_limit() -> None:
    detokenizer = make_detokenizer(PythonTokenizer())
    steps = [(progress.text, pending) for progress, pending in stream(detokenizer, [0xFF] * 6, range(7))]
    assert steps[:3] == [("", "\ufffd" * count) for count in (1, 2, 3)]
    assert steps[3:] == [("\ufffd", "\ufffd" * 3)] * 3


def test_window_streams_random_bytes() -> None:
    rng, detokenizer = random.Random(17), make_detokenizer(PythonTokenizer())
    for _ in range(NUM_TEXTS):
        spelled = bytes(rng.choices(b"a \x80\xbf\xc3\xe2\xed\xf0\xf4\x90\x9f", k=10))
        assert streamed(detokenizer, spelled, range(11)) == spelled.decode(errors="replace")
        assert streamed(detokenizer, spelled, random_ends(rng, 0, 10)) == spelled.decode(errors="replace")


def test_decoder_cleanup_loses_no_words() -> None:
    """Cleanup changes text that was already streamed, so only words can be compared."""
    tokenizer = Tokenizer.from_str(word_piece().to_str())
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    ids = encode(tokenizer, "The dog does not mind ; it was there first .")
    assert streamed(make_detokenizer(tokenizer), ids, range(len(ids) + 1)).split()[:4] == ["The", "dog", "does", "not"]


# --- Cost per token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except([*FAST_KINDS, *OTHER_KINDS], [*BYTE_KINDS, *OTHER_KINDS]))
def test_offsets_stay_near_the_last_token(name: str) -> None:
    tokenizer = BYTE_KINDS[name]().tokenizer if name in BYTE_KINDS else OTHER_KINDS[name]()
    ids = [t for text in random_texts(200, seed=18) for t in encode(tokenizer, text) if t != 0][:3000]
    detokenizer = make_detokenizer(tokenizer)
    for end, (progress, _) in enumerate(stream(detokenizer, ids, range(50, len(ids) + 1)), 51):
        assert 0 <= end - progress.read_offset <= 3
        assert 0 <= progress.read_offset - progress.prefix_offset <= 6


@pytest.mark.parametrize("name", slow_except([*FAST_KINDS, *OTHER_KINDS], [*BYTE_KINDS, *OTHER_KINDS]))
def test_tokens_before_prefix_offset_can_be_dropped(name: str) -> None:
    tokenizer = BYTE_KINDS[name]().tokenizer if name in BYTE_KINDS else OTHER_KINDS[name]()
    detokenizer, rng = make_detokenizer(tokenizer), random.Random(19)
    special = getattr(tokenizer, "eos_token_id", None) or present(tokenizer.token_to_id(EOS))
    for sample in random_texts(NUM_TEXTS // 4, seed=20):
        ids = [t for token_id in encode(tokenizer, sample) for t in (token_id, *[special] * rng.choice([0, 0, 0, 2]))]
        prompt, so_far = rng.randint(0, len(ids)), ""
        prefix, read = detokenizer.start(ids[:prompt])
        for end in range(prompt + 1, len(ids) + 1):
            text, more, read = detokenizer.advance(ids[prefix:end], 0, read - prefix)
            prefix, read, so_far = prefix + more, prefix + read, so_far + text
        pending = detokenizer.pending(ids[prefix:], 0, read - prefix)
        assert so_far + pending == streamed(detokenizer, ids, range(prompt, len(ids) + 1))


class CountingList(list[int]):
    """Counts how many ids are read."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        result = super().__getitem__(at)
        CountingList.num_read += len(result) if isinstance(at, slice) else 1
        return result


@pytest.mark.parametrize("make", [lambda: byte_level().tokenizer, lambda: metaspace().tokenizer, words])
@pytest.mark.parametrize("opening", ["", "dog"])
def test_many_special_tokens_take_linear_time(make: Any, opening: str) -> None:
    """With `ignore_eos`, a completion may consist of eos tokens only."""
    tokenizer = make()
    special, detokenizer, length = tokenizer.token_to_id(EOS), make_detokenizer(make()), 2000
    ids, CountingList.num_read = CountingList(encode(tokenizer, opening)), 0
    prefix, read = detokenizer.start(ids)
    for _ in range(length):
        ids.append(special)
        text, prefix, read = detokenizer.advance(ids, prefix, read)
        assert text == ""
    ids.extend(encode(tokenizer, "dog"))
    assert detokenizer.advance(ids, prefix, read).text.strip() == "dog"
    assert CountingList.num_read < 6 * length
