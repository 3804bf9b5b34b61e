"""`text_offset` of `/v1/completions`, with and without `echo`, whole and streamed."""

import asyncio
import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from lorax_server.generation.generation import find_token_offsets
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import FinishReason, Output, ResolvedAdapter, SampledToken, StartInfo
from tests.server.fake_server import Routes, complete
from tests.server.service_harness import settle
from tests.text.tokenizers import BOS, BYTE_KINDS, EOS, byte_level, random_texts, sentencepiece, word_piece

PATH = "/v1/completions"
PROMPT = "Größe 👩‍👩‍👧 went"


@cache
def with_special_tokens(kind: str) -> TextTokenizer:
    """Create a tokenizer that adds a token before and after every text."""
    made = {"byte-level": byte_level, "sentencepiece": sentencepiece}
    tokenizer = Tokenizer.from_str((made[kind]().tokenizer if kind in made else word_piece()).to_str())
    special = [(name, tokenizer.token_to_id(name)) for name in (BOS, EOS)]
    ends = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=special)
    trimmed = [processors.ByteLevel(trim_offsets=True)] if kind == "byte-level" else []
    tokenizer.post_processor = processors.Sequence([*trimmed, ends])
    return TextTokenizer(tokenizer, {"eos_token": EOS}, {})


class ScoringRoutes(Routes):
    """Routes with an engine that generates a given text and scores prompts. The adapter `own` has another tokenizer."""

    def __init__(self, base: str, answer: str, own: str | None = None) -> None:
        super().__init__(["own"])
        tokenizers = copy.copy(self.service.tokenizers)
        tokenizers.base = with_special_tokens(base)
        tokenizers.find = self._find  # type: ignore[method-assign]
        self.service.tokenizers = tokenizers
        self.own, self.text = own, answer

    async def _find(self, adapter: ResolvedAdapter) -> TextTokenizer:
        return with_special_tokens(self.own or "") if adapter.identity else self.service.tokenizers.base

    async def _emit_in_two_steps(self, request_id: int, *_: int) -> None:
        (request,) = (each for each in self.engine.added if each.request_id == request_id)
        tokenizer = (
            self.service.tokenizers.base if not request.adapter_identity else with_special_tokens(self.own or "")
        )
        tokens = tokenizer.encode(self.text, add_special_tokens=False)[: request.stop.max_new_tokens]
        prompt = [-1.0] * (len(request.prompt_ids) - 1) if request.prompt_logprobs else None
        for place, token_id in enumerate(tokens):
            end = FinishReason.LENGTH if place == len(tokens) - 1 else None
            sampled, started = (SampledToken(token_id, -0.5),), StartInfo(0.0, 0.0, 0)
            self.engine._deliver(Output(request_id, sampled, end, start_info=started, prompt_logprobs=prompt))
            prompt = None
            await settle()

    def complete_both_ways(self, **more: Any) -> tuple[str, list[str], list[int]]:
        """Return the text, tokens and offsets. Check that the whole and streamed responses match."""
        body = complete(**{"logprobs": 0, "max_tokens": 64, "add_special_tokens": True} | more)
        choice = self.post(PATH, body).json["choices"][0]
        whole = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        if more.get("max_tokens") == 0 or "stop" in more:
            return whole
        events = [event["choices"][0] for event in self.post(PATH, body | {"stream": True}).events]
        assert "".join(event["text"] for event in events) == whole[0]
        assert [token for event in events for token in event["logprobs"]["tokens"]] == whole[1]
        assert [offset for event in events for offset in event["logprobs"]["text_offset"]] == whole[2]
        return whole


def check(text: str, tokens: list[str], offsets: list[int]) -> None:
    """Check that offsets increase and that each printable token is at its offset."""
    assert offsets == sorted(offsets)
    assert 0 <= offsets[0] <= offsets[-1] <= len(text)
    for token, offset in zip(tokens, offsets, strict=True):
        if token not in (BOS, EOS) and "\ufffd" not in token:
            assert text.startswith((token, token.removeprefix(" ")), offset), (token, offset)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("own", [None, "sentencepiece", "byte-level"])
def test_text_offsets_point_to_tokens(kind: str, own: str | None) -> None:
    answer = " ÿ 👋🌍 on"
    routes = ScoringRoutes(kind, answer, own)
    model = "own" if own else ""
    text, tokens, offsets = routes.complete_both_ways(model=model, prompt=PROMPT, echo=True)
    assert text.startswith(PROMPT)
    check(text, tokens, offsets)
    assert (tokens[0], offsets[:2]) == (BOS, [0, 0])
    first = next(i for i in range(1, len(tokens)) if tokens[i] == EOS) + 1
    assert offsets[first - 1] == offsets[first] == len(PROMPT)
    alone, later, places = routes.complete_both_ways(model=model, prompt=PROMPT)
    assert (alone, later) == (text[len(PROMPT) :], tokens[first:])
    assert places == [offset - len(PROMPT) for offset in offsets[first:]]
    asyncio.run(routes.service.tokenizers.close())


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_token_prompt_offsets_match_text_prompt(kind: str) -> None:
    routes = ScoringRoutes(kind, " on")
    ids = with_special_tokens(kind).encode(PROMPT)
    as_text, as_ids = (
        routes.complete_both_ways(prompt=PROMPT, echo=True),
        routes.complete_both_ways(prompt=ids, echo=True),
    )
    assert as_text == as_ids
    assert routes.complete_both_ways(prompt=PROMPT, echo=True, max_tokens=0)[2] == as_text[2][: len(ids)]


def test_special_tokens_in_prompt_count_toward_text_offsets() -> None:
    text, tokens, offsets = ScoringRoutes("byte-level", " on").complete_both_ways(prompt=f"a{EOS}b", echo=True)
    assert text == f"a{EOS}b on"
    assert dict(zip(tokens[1:4], offsets[1:4], strict=True)) == {"a": 0, EOS: 1, "b": 5}


def test_buffered_text_has_correct_offsets() -> None:
    """Text that may become a stop string is returned later with correct offsets."""
    routes = ScoringRoutes("byte-level", "a+=b+==c+=-d")
    text, tokens, offsets = routes.complete_both_ways(prompt="x", echo=True, stop="+=-")
    assert text == "xa+=b+==c"
    check(text, tokens[:-4], offsets[:-4])
    assert offsets[-1] == len(text)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_token_starts_match_decoded_token_offsets(kind: str) -> None:
    tokenizer = TextTokenizer(BYTE_KINDS[kind]().tokenizer, {}, {})
    compared = 0
    for text in random_texts(200, seed=5):
        ids = tokenizer.encode(text)
        if tokenizer.decode(ids) == text and not text.startswith(" ") and ids:
            result = find_token_offsets(tokenizer.detokenizer, ids)
            assert tokenizer.find_token_starts(text) == result
            assert all(before <= after for before, after in pairwise(result))
            compared += 1
    assert compared > 5


def test_offsets_of_lossy_tokenizer_stay_within_text() -> None:
    tokenizer = with_special_tokens("word-piece")
    for text in random_texts(100, seed=6):
        starts = tokenizer.find_token_starts(text)
        assert starts == sorted(starts)
        assert all(0 <= start <= len(text) for start in starts)
