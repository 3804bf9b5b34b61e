"""Untrusted regular expressions either match like `re` or are rejected."""

import re
import time

import pytest

from lorax_server.adapters import patterns
from lorax_server.adapters.patterns import MAX_PATTERN_LENGTH, PatternMatcher
from lorax_server.errors import AdapterError

# How PEFT embeds config patterns in larger patterns.
WRAPPINGS = ("X", r"(.*\.)?(X)$", r"(^|.*\.)X($|\..*)", r"(?:^|.*?\.)X\.(?P<index>\d+)\.")
VALID_PATTERNS = [
    *("q_proj", "layers", r".*\.(q|k)_proj", r"layers\.[01]\..*", "", ".", ".*", "^model", "proj$", "a)|(q_proj"),
    *("q_proj|v_proj", "(?i)Q_PROJ", "(?i:Q_PROJ)", "(?x) q_ proj # comment", r"\Amodel.*\Z", r"(?=q)q_\w+", "model|h"),
    *("[_[]", "[]x]+", "[^.]+", r"[\w.]*", "(?P<x>q)_(?P<y>proj)", r"(o)*\1", "(?:q|qq|q_)*+proj", "(?>q|q_)proj"),
    *("_{1}", "_{1,}", "_{,2}", "_{", "_{}", "_{}e}", r"(?s:.)*", r"(?<=\.)q_proj", r"(?<!\.)q_proj", r"\.\d{1,2}\."),
]
NAMES = [
    *("", "q_proj", "model.layers.1.self_attn.q_proj", "layers.12.mlp.down_proj", "transformer.h.0.attn.c_attn"),
    *("model.decoder.layers.3.fc1", "lm_head", "model.layers.0.experts.1.q_proj\n", "model.layers.1.Q_PROJ"),
]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("pattern", VALID_PATTERNS)
def test_matches_agree_with_re(pattern: str, wrapping: str) -> None:
    wrapped, ours = wrapping.replace("X", pattern), PatternMatcher("acme/tuned")
    try:
        oracle = re.compile(wrapped)
    except re.error:
        with pytest.raises(AdapterError, match="adapter 'acme/tuned': pattern"):
            ours.match(wrapped, "")
        return
    for name in NAMES:
        actual, expected = ours.match(wrapped, name), oracle.match(name)
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert (actual.span(), actual.groupdict()) == (expected.span(), expected.groupdict())
        assert ours.fullmatch(wrapped, name) is (oracle.fullmatch(name) is not None)


REJECTED_PATTERNS = {
    "fuzzy": ["q_proj{e}", "(?:q_proj){e<=2}", "q{i,d,s}", "(q){s<3:[a-z]}"],
    "verbose": [
        "(?x)(?:(?:q{1 0 0 0}){1 0 0 0}){1 0 0 0}",
        "(?ix)q\n+",
        "(?x:q\xa0+)",
        "(?x)" + "(q" * 99 + ")\xa0+" * 99,
    ],
    "posix": ["[[:alpha:]]+", "[[:^alpha:]x]"],
    "only known to regex": [
        r"\p{L}",
        "(?V1)x",
        "(?b)x",
        "(?|a|b)",
        "(?<x>q)",
        "(?R)",
        "(?1)(q)",
        r"\L<x>",
        r"q\K_",
        r"\X",
    ],
    "too long": ["x" * (MAX_PATTERN_LENGTH + 1)],
    "invalid": ["(", ")", "[", "*", "x**", "(?P<", "(?P=x)", "[z-a]", r"\N{x}", r"\1", "x{2,1}", "x{99999999999999}"],
    "look-behind": ["(?<=a|bc)x", "(?<!a+)x", "(?<=a{2,3})"],
    "nested": ["(" * 4000 + ")" * 4000],
}


@pytest.mark.parametrize("pattern", [x for group in REJECTED_PATTERNS.values() for x in group], ids=lambda x: x[:20])
def test_incompatible_syntax_is_rejected(pattern: str) -> None:
    for match in (PatternMatcher("acme/tuned").match, PatternMatcher("acme/tuned").fullmatch):
        with pytest.raises(AdapterError) as refusal:
            match(pattern, "q_proj")
        assert str(refusal.value).startswith(f"adapter 'acme/tuned': pattern {pattern[:20]!r}"[:-1])
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "pattern",
    [
        *("(" * 100 + "a" + end * 100 for end in (")+", ")+?", ")++", "){2}", "){1,}", "){2,3}?", "|b){3}")),
        *("(?:a{1000}){1000}", "a{1000}" * 280, "(?:a|b){65535}", "(?i:(?:[^k]{200}){200})", "(?=(?:a{500}){500})x"),
        *("(q)(?(1)(?:a{500}){500}|b)", "(?>(?:a{500}){500})", "q_proj|(?:a{500}){500}", "(?<=(?:a{500}){500})"),
    ],
    ids=lambda pattern: pattern[-20:],
)
def test_large_repeats_are_rejected(pattern: str) -> None:
    """Compiling these patterns would exhaust memory: 100 nested `+` expand to 2^100 nodes."""
    with pytest.raises(AdapterError, match=r"nodes; at most 20000 are allowed"):
        PatternMatcher("acme/tuned").match(pattern, "q_proj")


@pytest.mark.parametrize(
    "pattern",
    ["(?i)" + "[\u0100-\uffff]" * 380, "[\x00-\U0010ffff]" * 380, "(?i)" + "[a-z]" * 390],
    ids=["wide, any case", "wide", "any case"],
)
def test_many_character_sets_compile_quickly(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`re.compile` takes up to 40 ms for each character set and cannot be interrupted."""
    monkeypatch.setattr(re, "compile", None)
    assert not PatternMatcher("acme/tuned").fullmatch(pattern, "q_proj")


@pytest.mark.parametrize(
    "pattern", ["(?:q|k|v){100}", "[a-z]{1,1000}", r"(?:\d{1,3}\.)+", "(?:" * 50 + "a" + ")*" * 50]
)
def test_common_repeats_are_accepted(pattern: str) -> None:
    oracle = re.compile(pattern)
    for name in ("q" * 100, "q" * 1000, "1.22.333.", "a" * 9, ""):
        assert PatternMatcher("x").fullmatch(pattern, name) == (oracle.fullmatch(name) is not None)


def test_long_pattern_is_accepted() -> None:
    assert PatternMatcher("x").fullmatch("q_proj" + "|x" * ((MAX_PATTERN_LENGTH - 6) // 2), "q_proj")


# --- budget

SLOW_PATTERNS = r"(?:\w|\.|\w\.|\w\w)*[!?]"


def test_catastrophic_backtracking_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_BUDGET_S", 0.05)
    started = time.process_time()  # a busy machine may be slower
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* (too long|time budget)"):
        PatternMatcher("acme/tuned").fullmatch(SLOW_PATTERNS, NAMES[2])
    assert time.process_time() - started < 5


def match_many_names(ours: PatternMatcher) -> None:
    """Match many names with fast patterns."""
    for number in range(100_000):
        ours.match(f"x{number}", "q_proj")


def test_patterns_share_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_BUDGET_S", 0.05)
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* (too long|time budget)"):
        match_many_names(PatternMatcher("acme/tuned"))
    assert PatternMatcher("another").match("x", "x")


def test_timeout_exhausts_budget_for_later_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_BUDGET_S", 0.05)
    ours = PatternMatcher("acme/tuned")
    for pattern in (SLOW_PATTERNS, "q_proj"):
        with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* (too long|time budget)"):
            ours.match(pattern, NAMES[2])
