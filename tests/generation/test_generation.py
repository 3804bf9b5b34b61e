"""Text streamed token by token equals the text of all tokens decoded together."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lorax_server.generation.generation import Generation
from lorax_server.text.detokenizer import Detokenizer, make_detokenizer
from lorax_server.types import FinishReason, Output, Request, SampledToken, SamplingParams, StopParams
from tests.text.tokenizers import (
    BYTE_KINDS,
    EOS,
    OTHER_KINDS,
    Kind,
    byte_level,
    decode_complete,
    random_texts,
    streamed,
)

TOKENIZERS = {name: lambda make=make: make().tokenizer for name, make in BYTE_KINDS.items()} | OTHER_KINDS


def encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def make_generation(detokenizer: Detokenizer, prompt_ids: Sequence[int], stop: StopParams) -> Generation:
    return Generation(Request(0, prompt_ids, SamplingParams(), stop), detokenizer)


def append(generation: Generation, token_id: int) -> str:
    generation.append_output(Output(0, (SampledToken(token_id, 0.0),)))
    return generation.events[-1].text


def feed(generation: Generation, ids: Sequence[int]) -> tuple[str, int]:
    """Append tokens until the completion finishes. Return its text and the number of tokens."""
    parts = []
    for token_id in ids:
        parts.append(append(generation, token_id))
        if generation.completion.finish_reason is not None:
            break
    assert generation.text == "".join(parts)
    return generation.text, len(parts)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_equals_text_decoded_with_all_tokens(name: str) -> None:
    """Compare with a detokenizer that sees all tokens, because `Generation` drops decoded tokens."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(1)
    detokenizer = make_detokenizer(tokenizer)
    for text in random_texts(100, seed=2, max_pieces=40):
        ids = encode(tokenizer, text)
        if not ids:
            continue
        prompt = rng.randrange(len(ids))
        generation = make_generation(detokenizer, ids[:prompt], StopParams(max_new_tokens=len(ids) - prompt))
        result, count = feed(generation, ids[prompt:])
        assert result == streamed(detokenizer, ids, range(prompt, len(ids) + 1))
        assert (count, generation.completion.finish_reason) == (len(ids) - prompt, FinishReason.LENGTH)
        assert generation.completion.token_ids == ids[prompt:]


@pytest.mark.parametrize("name", BYTE_KINDS)
def test_text_equals_decoded_bytes(name: str) -> None:
    kind, rng = BYTE_KINDS[name](), random.Random(3)
    detokenizer = make_detokenizer(kind.tokenizer)
    for text in random_texts(100, seed=4, max_pieces=60):
        ids = encode(kind.tokenizer, text)
        prompt, end = sorted((rng.randrange(len(ids)), rng.randrange(1, len(ids) + 1)))
        if prompt == end:
            continue
        result, _ = feed(
            make_generation(detokenizer, ids[:prompt], StopParams(max_new_tokens=end - prompt)), ids[prompt:end]
        )
        assert decode_complete(kind.joined(ids[:prompt])) + result == kind.joined(ids[:end]).decode(errors="replace")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_decoded_tokens_are_dropped(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    detokenizer = make_detokenizer(tokenizer)
    ids = [token_id for text in random_texts(200, seed=6) for token_id in encode(tokenizer, text)][:3000]
    assert len(ids) > 1500
    prompt = 500
    generation = make_generation(detokenizer, ids[:prompt], StopParams(max_new_tokens=len(ids)))
    max_tokens_kept, parts = 0, []
    for token_id in ids[prompt:]:
        parts.append(append(generation, token_id))
        max_tokens_kept = max(max_tokens_kept, len(generation._ids))
        assert generation._shift + len(generation._ids) == prompt + len(generation.completion.token_ids)
    assert max_tokens_kept < 60
    assert "".join(parts) == streamed(detokenizer, ids, range(prompt, len(ids) + 1)).removesuffix(
        detokenizer.pending(
            generation._ids, generation._prefix - generation._shift, generation._read - generation._shift
        )
    )


def test_special_tokens_do_not_split_multibyte_characters() -> None:
    kind = byte_level()
    eos, detokenizer = kind.token_id(EOS), make_detokenizer(kind.tokenizer)
    ids = encode(kind.tokenizer, "naïve 日本語")
    mixed = [each for token_id in ids for each in (eos, eos, token_id)]
    generation = make_generation(detokenizer, [eos], StopParams(max_new_tokens=len(mixed)))
    assert feed(generation, mixed)[0] == "naïve 日本語"


# --- Stop rules -------------------------------------------------------------------------------------------------------


def find_stop_by_decoding(kind: Kind, prompt: Sequence[int], ids: Sequence[int], stop: StopParams) -> tuple[str, int]:
    """Decode all tokens after each step and search for the earliest stop string."""
    before = len(decode_complete(kind.joined(prompt)))
    for count in range(1, len(ids) + 1):
        spelled = kind.joined([*prompt, *ids[:count]])
        text = (decode_complete(spelled) if count < len(ids) else spelled.decode(errors="replace"))[before:]
        ends = [(text.index(each) + len(each), -len(each)) for each in stop.stop_strings if each in text]
        if ends:
            end, length = min(ends)
            return text[: end if stop.include_stop else end + length], count
    return text, len(ids)


@pytest.mark.parametrize("include_stop", [True, False])
@pytest.mark.parametrize("name", BYTE_KINDS)
def test_stop_strings_match_reference_search(name: str, include_stop: bool) -> None:
    kind, rng, num_stopped = BYTE_KINDS[name](), random.Random(7), 0
    detokenizer = make_detokenizer(kind.tokenizer)
    for text in random_texts(200, seed=8):
        prompt, ids = encode(kind.tokenizer, "The dog"), encode(kind.tokenizer, text)
        spelled = kind.joined([*prompt, *ids]).decode(errors="replace")[7:]
        places = [sorted(rng.choices(range(len(spelled) + 1), k=2)) for _ in range(3)]
        wanted = tuple(spelled[start : min(end, start + 6)] for start, end in places if start < end)
        stop = StopParams(max_new_tokens=len(ids), stop_strings=wanted, include_stop=include_stop)
        generation = make_generation(detokenizer, prompt, stop)
        expected = find_stop_by_decoding(kind, prompt, ids, stop)
        assert feed(generation, ids) == expected
        num_stopped += generation.completion.finish_reason is FinishReason.STOP_SEQUENCE
    assert num_stopped > 100


@pytest.mark.parametrize("include_stop", [True, False])
def test_eos_and_stop_tokens_finish_completion(include_stop: bool) -> None:
    kind = byte_level()
    eos, detokenizer = kind.token_id(EOS), make_detokenizer(kind.tokenizer)
    ids = encode(kind.tokenizer, "The quick brown fox")
    ended = make_generation(detokenizer, ids, StopParams(eos_token_ids=frozenset({eos}), include_stop=include_stop))
    assert feed(ended, [*ids[:2], eos, *ids]) == (kind.joined(ids[:2]).decode(), 3)
    assert ended.completion.finish_reason is FinishReason.EOS_TOKEN
    stopped = make_generation(
        detokenizer, ids, StopParams(stop_token_ids=frozenset({ids[2]}), include_stop=include_stop)
    )
    assert feed(stopped, ids) == (kind.joined(ids[: 3 if include_stop else 2]).decode(), 3)
    assert stopped.completion.finish_reason is FinishReason.STOP_SEQUENCE


def test_incomplete_final_character_is_replaced() -> None:
    kind = byte_level()
    token = {kind.bytes_of(i): i for i in range(kind.tokenizer.get_vocab_size())}
    ids = [token[bytes([byte])] for byte in "é日".encode()]
    generation = make_generation(make_detokenizer(kind.tokenizer), [], StopParams(max_new_tokens=4))
    assert [append(generation, token_id) for token_id in ids[:4]] == ["", "é", "", "\ufffd"]
