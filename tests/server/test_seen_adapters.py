"""The memory of names and the identities that they have meant."""

import pytest

from lorax_server.server import seen_adapters
from lorax_server.server.access.model_names import Named
from lorax_server.server.seen_adapters import MAX_NAMES, SeenAdapters

POET, BARD = Named("hub", "owner/poet"), Named("local", "bard")


def test_a_name_that_has_meant_several() -> None:
    seen = SeenAdapters()
    for identity in ("old", "new", "newer", "new"):
        seen.note(identity, POET)
    assert seen.identities(POET) == ["old", "newer", "new"]
    assert seen.first_name("old") == POET
    assert seen.identities(BARD) == []
    assert seen.first_name("unknown") is None


def test_two_names_that_mean_the_same() -> None:
    seen = SeenAdapters()
    seen.note("shared", POET)
    seen.note("shared", BARD)
    assert seen.identities(POET) == seen.identities(BARD) == ["shared"]
    assert list(seen.names("shared")) == [POET, BARD]


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    seen = SeenAdapters()
    for identity, name in (("old", POET), ("new", POET), ("new", BARD)):
        seen.note(identity, name)
    seen.pin("new", BARD)
    seen.forget_name("new", POET)
    seen.forget_name("new", POET)
    assert (seen.latest(POET), seen.latest(BARD), seen.first_name("new")) == ("old", "new", BARD)
    seen.forget("old")
    seen.forget("new")
    assert not any((seen._names, seen._identities, seen._sorted, seen._pins))


def test_what_is_pinned_is_remembered_by_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_adapters, "MAX_SEEN", 3)
    seen = SeenAdapters()
    seen.note("pinned", POET)
    seen.pin("pinned", POET)
    for identity in "abcde":
        seen.note(identity, BARD)
    assert seen.identities(POET) == ["pinned"]  # or it could not be unloaded by name
    assert seen.identities(BARD) == ["d", "e"]
    assert seen.pinned_by("pinned") == {POET}
    seen.unpin("pinned")
    seen.unpin("pinned")
    assert seen.pinned_by("pinned") == set()


def test_merges_are_few_and_forget_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_adapters, "MAX_MERGES", 2)
    seen = SeenAdapters()
    seen.note("poet", POET)
    for number in range(100):
        seen.note(f"merge {number}", Named("", "poet,bard"))
    assert sorted(seen.identities_after("")) == ["merge 98", "merge 99", "poet"]
    assert len(seen._merges) == 2


def test_what_is_wrong_with_a_place_is_known_until_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_adapters, "MAX_FAILED", 2)
    seen = SeenAdapters()
    for number in range(5):
        seen.set_error(Named("local", str(number)), "half of it is missing")
    seen.set_error(POET, "no header")
    assert seen.error(POET) == "no header"
    assert seen.error(Named("local", "4"))
    assert seen.error(Named("local", "3")) is seen.error(BARD) is seen.error(None) is None
    seen.note("whole", POET)
    assert seen.error(POET) is None


def test_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_adapters, "MAX_SEEN", 3)
    seen = SeenAdapters()
    seen.note("a", POET)
    seen.note("a", BARD)
    for identity in ("b", "c", "a", "d"):
        seen.note(identity, POET)
    assert seen.identities(POET) == ["c", "a", "d"]
    seen.note("e", POET)
    seen.note("f", POET)
    assert seen.identities(BARD) == []
    assert seen.first_name("a") is None
    assert len(seen._identities) == 1


def test_an_adapter_of_which_there_are_many_copies_has_few_places() -> None:
    seen = SeenAdapters()
    seen.note("shared", POET)
    copies = [Named("local", f"bard-{number}") for number in range(100)]
    for name in copies:
        seen.note("shared", name)
        seen.note("shared", BARD)  # the one that is used is kept
    assert len(list(seen.names("shared"))) == len(seen._identities) == MAX_NAMES
    assert seen.first_name("shared") == POET
    assert seen.latest(POET) == seen.latest(BARD) == seen.latest(copies[-1]) == "shared"
    assert seen.latest(copies[1]) == ""


def test_many_copies_do_not_push_out_the_place_that_is_pinned() -> None:
    seen = SeenAdapters()
    seen.note("shared", POET)
    seen.note("shared", BARD)
    seen.pin("shared", BARD)
    for copy in range(2 * MAX_NAMES):
        seen.note("shared", Named("hub", f"owner/copy-{copy}"))
    assert seen.identities(BARD) == ["shared"]
    assert len(list(seen.names("shared"))) == MAX_NAMES
