"""Regular expressions of strangers: they match as `re` does, or they are refused."""

import re
import time

import pytest

from lorax_server.adapters import patterns
from lorax_server.adapters.patterns import MAX_LENGTH, Patterns
from lorax_server.errors import AdapterError

# The larger patterns into which PEFT puts a pattern of the config.
WRAPPINGS = ("X", r"(.*\.)?(X)$", r"(^|.*\.)X($|\..*)", r"(?:^|.*?\.)X\.(?P<index>\d+)\.")
USUAL = [
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
@pytest.mark.parametrize("pattern", USUAL)
def test_they_mean_what_they_mean_to_re(pattern: str, wrapping: str) -> None:
    wrapped, ours = wrapping.replace("X", pattern), Patterns("acme/tuned")
    try:
        oracle = re.compile(wrapped)
    except re.error:
        with pytest.raises(AdapterError, match="adapter 'acme/tuned': pattern"):
            ours.match(wrapped, "")
        return
    for name in NAMES:
        found, expected = ours.match(wrapped, name), oracle.match(name)
        assert (found is None) == (expected is None), name
        if expected is not None:
            assert (found.span(), found.groupdict()) == (expected.span(), expected.groupdict())
        assert ours.fullmatch(wrapped, name) is (oracle.fullmatch(name) is not None)


REFUSED = {
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
    "too long": ["x" * (MAX_LENGTH + 1)],
    "invalid": ["(", ")", "[", "*", "x**", "(?P<", "(?P=x)", "[z-a]", r"\N{x}", r"\1", "x{2,1}", "x{99999999999999}"],
    "look-behind": ["(?<=a|bc)x", "(?<!a+)x", "(?<=a{2,3})"],
    "nested": ["(" * 4000 + ")" * 4000],
}


@pytest.mark.parametrize("pattern", [x for group in REFUSED.values() for x in group], ids=lambda x: x[:20])
def test_what_re_does_not_know_or_reads_otherwise_is_refused(pattern: str) -> None:
    for match in (Patterns("acme/tuned").match, Patterns("acme/tuned").fullmatch):
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
def test_repeats_that_regex_would_unroll_are_refused(pattern: str) -> None:
    """Compiling them takes all memory: 100 nested `+` are 2^100 nodes."""
    with pytest.raises(AdapterError, match=r"nodes with its repeats; at most 20000 are allowed"):
        Patterns("acme/tuned").match(pattern, "q_proj")


@pytest.mark.parametrize(
    "pattern",
    ["(?i)" + "[\u0100-\uffff]" * 380, "[\x00-\U0010ffff]" * 380, "(?i)" + "[a-z]" * 390],
    ids=["wide, any case", "wide", "any case"],
)
def test_many_sets_of_characters(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`re.compile` takes up to 40 ms for each of them, which nothing can stop."""
    monkeypatch.setattr(re, "compile", None)
    assert not Patterns("acme/tuned").fullmatch(pattern, "q_proj")


@pytest.mark.parametrize(
    "pattern", ["(?:q|k|v){100}", "[a-z]{1,1000}", r"(?:\d{1,3}\.)+", "(?:" * 50 + "a" + ")*" * 50]
)
def test_usual_repeats_are_allowed(pattern: str) -> None:
    oracle = re.compile(pattern)
    for name in ("q" * 100, "q" * 1000, "1.22.333.", "a" * 9, ""):
        assert Patterns("x").fullmatch(pattern, name) == (oracle.fullmatch(name) is not None)


def test_a_long_pattern_is_allowed() -> None:
    assert Patterns("x").fullmatch("q_proj" + "|x" * ((MAX_LENGTH - 6) // 2), "q_proj")


# --- budget

RUNAWAY = r"(?:\w|\.|\w\.|\w\w)*[!?]"


def test_a_pattern_that_runs_wild_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "BUDGET_S", 0.05)
    started = time.process_time()  # a busy machine may take longer
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* too long"):
        Patterns("acme/tuned").fullmatch(RUNAWAY, NAMES[2])
    assert time.process_time() - started < 5


def try_many(ours: Patterns) -> None:
    """Match many names, each of which is quick."""
    for number in range(100_000):
        ours.match(f"x{number}", "q_proj")


def test_all_patterns_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "BUDGET_S", 0.05)
    with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* too long"):
        try_many(Patterns("acme/tuned"))
    assert Patterns("another").match("x", "x")


def test_a_pattern_that_ran_wild_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "BUDGET_S", 0.05)
    ours = Patterns("acme/tuned")
    for pattern in (RUNAWAY, "q_proj"):
        with pytest.raises(AdapterError, match=r"adapter 'acme/tuned': pattern .* too long"):
            ours.match(pattern, NAMES[2])
