"""Tests for stopping criteria: examples, then a comparison with a reference definition for random token boundaries."""

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorax_server.generation.stopping import FinishReason, StoppingCriteria
from lorax_server.pb import generate_pb2
from lorax_server.types import StopParams

LENGTH, EOS_TOKEN, STOP_SEQUENCE = FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE
EOS, OTHER = 2, 7
NO_LENGTH_LIMIT = 10_000


def make_criteria(
    eos: Iterable[int] = (), stop: Sequence[str] = (), max_new_tokens: int = 20, **more: Any
) -> StoppingCriteria:
    ids = frozenset(more.pop("stop_token_ids", ()))
    return StoppingCriteria(
        StopParams(
            eos_token_ids=frozenset(eos),
            stop_strings=tuple(stop),
            max_new_tokens=max_new_tokens,
            stop_token_ids=ids,
            **more,
        )
    )


def feed(
    texts: Iterable[str], *stop: str, include: bool = True, max_new_tokens: int = NO_LENGTH_LIMIT
) -> StoppingCriteria:
    """Return the criteria after these token texts, up to the first stop."""
    criteria = make_criteria([EOS], stop, max_new_tokens, include_stop=include)
    for text in texts:
        if criteria(OTHER, text)[0]:
            break
    return criteria


# --- Tokens -----------------------------------------------------------------------------------------------------------


def test_completion_stops_at_max_new_tokens() -> None:
    criteria = make_criteria(max_new_tokens=3)
    assert criteria.remaining_tokens == criteria.max_new_tokens == 3
    assert [criteria(OTHER, text) for text in "abc"] == [(False, None), (False, None), (True, LENGTH)]
    assert (criteria.current_output, criteria.current_tokens, criteria.remaining_tokens) == ("abc", 3, 0)


@pytest.mark.parametrize("eos", [{2}, {1, 2}])
def test_any_eos_token_stops_completion(eos: set[int]) -> None:
    criteria = make_criteria(eos)
    assert criteria(OTHER, "a") == (False, None)
    assert criteria(EOS, "") == (True, EOS_TOKEN)
    assert criteria.finish_reason is EOS_TOKEN


def test_no_token_stops_without_eos_tokens() -> None:
    criteria = make_criteria()
    assert [criteria(token, "")[0] for token in range(10)] == [False] * 10


@pytest.mark.parametrize("include", [True, False])
def test_eos_text_is_excluded_from_output(include: bool) -> None:
    criteria = make_criteria([EOS], include_stop=include)
    criteria(OTHER, "a")
    criteria(EOS, "</s>")
    assert (criteria.current_output, criteria.new_text) == ("a", "")


def test_ignored_eos_token_is_text() -> None:
    criteria = make_criteria([EOS], max_new_tokens=2, ignore_eos=True)
    assert criteria(EOS, "</s>") == (False, None)
    assert criteria(EOS, "</s>") == (True, LENGTH)
    assert criteria.current_output == "</s></s>"


def test_stop_token_applies_with_ignore_eos() -> None:
    criteria = make_criteria([EOS], ignore_eos=True, stop_token_ids=[5, 6])
    assert criteria(EOS, "") == (False, None)
    assert criteria(6, "") == (True, STOP_SEQUENCE)


@pytest.mark.parametrize(("include", "output"), [(True, "ab"), (False, "a")])
def test_include_stop_shows_stop_token_text(include: bool, output: str) -> None:
    criteria = make_criteria(stop_token_ids=[5], include_stop=include)
    criteria(OTHER, "a")
    assert criteria(5, "b") == (True, STOP_SEQUENCE)
    assert criteria.current_output == output


def test_eos_takes_precedence_over_stop_token() -> None:
    assert make_criteria([EOS], stop_token_ids=[EOS])(EOS, "") == (True, EOS_TOKEN)


def test_ignored_eos_token_can_be_stop_token() -> None:
    criteria = make_criteria([EOS], ignore_eos=True, stop_token_ids=[EOS])
    assert criteria(EOS, "") == (True, STOP_SEQUENCE)


@pytest.mark.parametrize(
    ("token", "text", "reason"), [(EOS, "", EOS_TOKEN), (5, "", STOP_SEQUENCE), (7, "x", STOP_SEQUENCE)]
)
def test_stop_rule_takes_precedence_over_length(token: int, text: str, reason: FinishReason) -> None:
    assert make_criteria([EOS], ["x"], 1, stop_token_ids=[5])(token, text) == (True, reason)


def test_min_new_tokens_suppresses_stop_rules() -> None:
    criteria = make_criteria([EOS], ["x"], stop_token_ids=[5], min_new_tokens=3)
    assert [criteria(*token)[0] for token in [(EOS, "</s>"), (5, "five"), (OTHER, "x")]] == [False] * 3
    assert criteria.current_output == "</s>fivex"
    assert criteria(EOS, "") == (True, EOS_TOKEN)


def test_stop_string_must_start_after_min_new_tokens() -> None:
    criteria = make_criteria(stop=["ab"], min_new_tokens=1)
    assert [criteria(OTHER, text)[0] for text in ("a", "b", "a", "b")] == [False, False, False, True]


def test_equal_min_and_max_stops_by_length() -> None:
    criteria = make_criteria([EOS], min_new_tokens=2, max_new_tokens=2)
    assert [criteria(EOS, "") for _ in range(2)] == [(False, None), (True, LENGTH)]


# --- Stop strings -----------------------------------------------------------------------------------------------------


CASES = [
    # Token texts, stop strings, output with the stop string, output without it.
    (["one ", "two ", "three"], ["two"], "one two", "one "),
    (["one t", "w", "o three"], ["two"], "one two", "one "),
    (["one two three"], ["two"], "one two", "one "),
    (["two"], ["two"], "two", ""),
    (["aaab"], ["aab"], "aaab", "a"),
    ([*"aaaaab"], ["aab"], "aaaaab", "aaa"),
    ([*"abababac"], ["ababac"], "abababac", "ab"),
    (["abc"], ["abc", "b"], "ab", "a"),  # the earliest end position applies
    (["xabc"], ["c", "abc", "bc"], "xabc", "x"),  # the longest match at this position applies
    ([*"xabc"], ["abc", "bc", "c"], "xabc", "x"),
    (["ab", "cd"], ["ab", "abcd"], "ab", ""),  # one is a prefix of the other
    ([*"xstopx"], ["stop", "top", "st"], "xst", "x"),
    (["abc", "abd", "ab"], ["abd"], "abcabd", "abc"),
    (["a\n", "\nb"], ["\n\n"], "a\n\n", "a"),
    (["x</", "s>y"], ["</s>", "<|end|>"], "x</s>", "x"),
    (["👩", "\u200d", "👧 x"], ["\u200d👧"], "👩\u200d👧", "👩"),
    (["e", "\u0301x"], ["é", "e\u0301"], "e\u0301", ""),  # compared by code point, without normalization
    (["a", "", "", "b"], ["ab"], "ab", ""),
    (["aXaX"], ["X", "X"], "aX", "a"),
]


@pytest.mark.parametrize(("texts", "stop", "included", "excluded"), CASES)
def test_stop_strings_are_found_across_tokens(
    texts: Sequence[str], stop: Sequence[str], included: str, excluded: str
) -> None:
    for include, output in ((True, included), (False, excluded)):
        criteria = feed(texts, *stop, include=include)
        assert (criteria.finish_reason, criteria.current_output) == (STOP_SEQUENCE, output)


@pytest.mark.parametrize("include", [True, False])
def test_similar_text_is_not_a_stop_string(include: bool) -> None:
    criteria = feed(["one ", "tw", "", "a two-", "tow Two"], "two ", "TWO", include=include)
    assert (criteria.finish_reason, criteria.current_output) == (None, "one twa two-tow Two")


def test_possible_stop_string_is_held_back() -> None:
    criteria = make_criteria(stop=["<|end|>"], include_stop=False)
    shown = []
    for text in ("a <", "|e", "nd", "x<", "<|", "end", "|>b"):
        criteria(OTHER, text)
        shown.append(criteria.new_text)
    assert shown == ["a ", "", "", "<|endx", "<", "", ""]


def test_included_stop_string_is_not_held_back() -> None:
    criteria = make_criteria(stop=["<|end|>"])
    for text in ("a <", "|e", "nd", "|>"):
        criteria(OTHER, text)
        assert criteria.new_text == text


@pytest.mark.parametrize(
    ("token", "last", "reason"), [(OTHER, "", LENGTH), (EOS, "", EOS_TOKEN), (5, "x", STOP_SEQUENCE)]
)
def test_held_back_text_is_shown_at_other_finish(token: int, last: str, reason: FinishReason) -> None:
    criteria = make_criteria([EOS], ["stop"], 2, stop_token_ids=[5], include_stop=False)
    criteria(OTHER, "a sto")
    assert criteria.current_output == "a "
    assert criteria(token, last) == (True, reason)
    assert (criteria.new_text, criteria.current_output) == ("sto", "a sto")


def test_pending_text_is_shown_only_at_finish() -> None:
    criteria = make_criteria(max_new_tokens=2)
    criteria(OTHER, "a", "\ufffd")
    assert criteria.current_output == "a"
    criteria(OTHER, "b", "\ufffd")
    assert (criteria.new_text, criteria.current_output) == ("b\ufffd", "ab\ufffd")


@pytest.mark.parametrize("include", [True, False])
def test_pending_text_is_dropped_after_stop_string(include: bool) -> None:
    criteria = make_criteria(stop=["b"], include_stop=include)
    assert criteria(OTHER, "abc", "\ufffd")[0]
    assert criteria.current_output == ("ab" if include else "a")


def test_pending_text_follows_held_back_text() -> None:
    criteria = make_criteria([EOS], ["stop"], include_stop=False)
    criteria(OTHER, "a st", "\ufffd")
    criteria(EOS, "", "\ufffd")
    assert criteria.current_output == "a st\ufffd"


@pytest.mark.parametrize(("include", "output"), [(True, "ab\ufffd"), (False, "a")])
def test_pending_text_can_complete_stop_string(include: bool, output: str) -> None:
    criteria = make_criteria([EOS], ["b\ufffd"], 2, include_stop=include)
    assert criteria(OTHER, "ab", "\ufffd") == (False, None)
    assert criteria(OTHER, "", "\ufffd and more") == (True, STOP_SEQUENCE)
    assert criteria.current_output == output


@pytest.mark.parametrize("include", [True, False])
def test_long_repetitive_stop_string_takes_linear_time(include: bool) -> None:
    """Comparing the whole stop string at each character would take hours."""
    huge = "a" * 100_000
    text = (huge[:-1] + "b") * 2 + huge
    criteria = feed([text[i : i + 1000] for i in range(0, len(text), 1000)], huge, huge + "b", include=include)
    assert criteria.finish_reason is STOP_SEQUENCE
    assert criteria.current_output == (text if include else text[: -len(huge)])


def test_one_of_thousand_stop_strings_is_found() -> None:
    stop = [f"<{i}>" for i in range(1000)]
    criteria = feed([*"text <1000> more <999> text"], *stop, include=False)
    assert (criteria.finish_reason, criteria.current_output) == (STOP_SEQUENCE, "text <1000> more ")


# --- Reference definition ---------------------------------------------------------------------------------------------


def reference_output(text: str, stop: Sequence[str], include: bool) -> tuple[bool, str]:
    """Cut the text at the stop string with the earliest end position. The longest one applies if several match."""
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return True, text[: end if include else end - max(lengths)]
    return False, text


def find_held_back(text: str, stop: Sequence[str]) -> str:
    """Return the longest text suffix that is a stop string prefix."""
    starts = {"", *(string[:length] for string in stop for length in range(len(string)))}
    return next(text[start:] for start in range(len(text) + 1) if text[start:] in starts)


def check(pieces: Sequence[str], stop: Sequence[str], include: bool) -> None:
    criteria = make_criteria([EOS], stop, len(pieces), include_stop=include)
    stopped, output = reference_output("".join(pieces), stop, include)
    so_far = streamed = ""
    for piece in pieces:
        finished, reason = criteria(OTHER, piece)
        so_far, streamed = so_far + piece, streamed + criteria.new_text
        assert output.startswith(streamed) and criteria.current_output == streamed  # noqa: PT018
        assert (reason is STOP_SEQUENCE) == reference_output(so_far, stop, include)[0]
        if finished:
            break
        assert streamed + ("" if include else find_held_back(so_far, stop)) == so_far
    assert criteria.finish_reason is (STOP_SEQUENCE if stopped else LENGTH)
    assert streamed == output


letters = st.text(alphabet="ab", max_size=14) | st.text(alphabet="abé👧 ", max_size=14)


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    """Draw a text split at random positions. Some tokens have no text."""
    text = draw(letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


@settings(max_examples=500, deadline=None)
@given(split_texts(), st.lists(letters.filter(len).map(lambda text: text[:5]), max_size=3), st.booleans())
def test_output_matches_reference_definition(pieces: list[str], stop: list[str], include: bool) -> None:
    check(pieces, stop, include)


@settings(max_examples=300, deadline=None)
@given(split_texts(), st.lists(letters.filter(len).map(lambda text: text[:5]), max_size=3), st.booleans())
def test_output_does_not_depend_on_token_boundaries(pieces: list[str], stop: list[str], include: bool) -> None:
    whole = "".join(pieces)
    outputs = {feed(cut, *stop, include=include, max_new_tokens=len(cut)).current_output for cut in (pieces, [whole])}
    outputs |= {feed(whole, *stop, include=include, max_new_tokens=max(1, len(whole))).current_output}
    assert len(outputs) == 1


def test_random_stop_strings_from_text_match_reference_definition() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 40)))
        starts = [rng.randrange(len(text)) for _ in range(rng.randint(1, 4))]
        stop = [text[start : start + rng.randint(1, 12)] for start in starts]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 20)))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        check(pieces, stop, include=False)
        check(pieces, stop, include=True)


# --- Finish reasons ---------------------------------------------------------------------------------------------------


def test_finish_reasons_match_protobuf_enum() -> None:
    names = {f"FINISH_REASON_{reason.name}": int(reason) for reason in FinishReason}
    assert names == dict(generate_pb2.FinishReason.items())
