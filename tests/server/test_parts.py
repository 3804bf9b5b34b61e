"""Which names mean which adapters."""

import pytest

from lorax_server.server import parts
from lorax_server.server.names import Named
from lorax_server.server.parts import Seen

POET, BARD = Named("hub", "owner/poet"), Named("local", "bard")


def test_a_name_that_has_meant_several() -> None:
    seen = Seen()
    for identity in ("old", "new", "newer", "new"):
        seen.note(identity, POET)
    assert seen.identities(POET) == ["old", "newer", "new"]
    assert seen.name("old") == POET
    assert seen.identities(BARD) == []
    assert seen.name("unknown") is None


def test_two_names_that_mean_the_same() -> None:
    seen = Seen()
    seen.note("shared", POET)
    seen.note("shared", BARD)
    assert seen.identities(POET) == seen.identities(BARD) == ["shared"]
    assert seen.is_meant_by_others("shared", POET)
    seen.note("own", BARD)
    assert not seen.is_meant_by_others("shared", POET)  # any more
    assert seen.is_meant_by_others("shared", BARD)


def test_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_SEEN", 3)
    seen = Seen()
    seen.note("a", POET)
    seen.note("a", BARD)
    for identity in ("b", "c", "a", "d"):
        seen.note(identity, POET)
    assert seen.identities(POET) == ["c", "a", "d"]
    seen.note("e", POET)
    seen.note("f", POET)
    assert seen.identities(BARD) == []
    assert seen.name("a") is None
    assert len(seen._hashes) == 1


def test_an_adapter_that_is_spelt_in_many_ways_has_few_names() -> None:
    seen = Seen()
    seen.note("shared", POET)
    spelt = [Named("local", f"bard{'/.' * number}") for number in range(100)]
    for name in spelt:
        seen.note("shared", name)
        seen.note("shared", BARD)  # the one that is used is kept
    assert len(list(seen.names("shared"))) == len(seen._hashes) == parts.MAX_SPELLINGS
    assert seen.name("shared") == POET
    assert seen.latest(POET) == seen.latest(BARD) == seen.latest(spelt[-1]) == "shared"
    assert seen.latest(spelt[1]) == ""
