"""AdapterNameIndex: names, identities, pins and eviction."""

import pytest

from lorax_server.server import adapter_name_index
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.adapter_name_index import MAX_NAMES_PER_ADAPTER, AdapterNameIndex

POET, BARD = AdapterKey("hub", "owner/poet"), AdapterKey("local", "bard")


def test_name_can_have_several_identities() -> None:
    index = AdapterNameIndex()
    for identity in ("old", "new", "newer", "new"):
        index.add(identity, POET)
    assert index.identities_of(POET) == ["old", "newer", "new"]
    assert index.first_name("old") == POET
    assert index.identities_of(BARD) == []
    assert index.first_name("unknown") is None


def test_two_names_can_share_one_identity() -> None:
    index = AdapterNameIndex()
    index.add("shared", POET)
    index.add("shared", BARD)
    assert index.identities_of(POET) == index.identities_of(BARD) == ["shared"]
    assert list(index.names_of("shared")) == [POET, BARD]


def test_remove_clears_all_state() -> None:
    index = AdapterNameIndex()
    for identity, name in (("old", POET), ("new", POET), ("new", BARD)):
        index.add(identity, name)
    index.pin("new", BARD)
    index.remove("new", only=POET)
    index.remove("new", only=POET)
    assert (index.latest_identity(POET), index.latest_identity(BARD), index.first_name("new")) == ("old", "new", BARD)
    index.remove("old")
    index.remove("new")
    assert not any((index._names, index._identities, index._pins))


def test_pinned_adapters_are_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_name_index, "MAX_ADAPTERS", 3)
    index = AdapterNameIndex()
    index.add("pinned", POET)
    index.pin("pinned", POET)
    for identity in "abcde":
        index.add(identity, BARD)
    assert index.identities_of(POET) == ["pinned"]  # or it could not be unloaded by name
    assert index.identities_of(BARD) == ["d", "e"]
    assert index.pinning_names("pinned") == {POET}
    index.unpin("pinned")
    index.unpin("pinned")
    assert index.pinning_names("pinned") == set()


def test_merges_are_limited_without_evicting_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_name_index, "MAX_MERGES", 2)
    index = AdapterNameIndex()
    index.add("poet", POET)
    for number in range(100):
        index.add(f"merge {number}", AdapterKey("", "poet,bard"))
    assert sorted(index.identities_after("")) == ["merge 98", "merge 99", "poet"]
    assert len(index._merges) == 2


def test_error_is_kept_until_next_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_name_index, "MAX_FAILED_NAMES", 2)
    index = AdapterNameIndex()
    for number in range(5):
        index.set_error(AdapterKey("local", str(number)), "half of it is missing")
    index.set_error(POET, "no header")
    assert index.find_error(POET) == "no header"
    assert index.find_error(AdapterKey("local", "4"))
    assert index.find_error(AdapterKey("local", "3")) is index.find_error(BARD) is index.find_error(None) is None
    index.add("whole", POET)
    assert index.find_error(POET) is None


def test_oldest_adapters_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_name_index, "MAX_ADAPTERS", 3)
    index = AdapterNameIndex()
    index.add("a", POET)
    index.add("a", BARD)
    for identity in ("b", "c", "a", "d"):
        index.add(identity, POET)
    assert index.identities_of(POET) == ["c", "a", "d"]
    index.add("e", POET)
    index.add("f", POET)
    assert index.identities_of(BARD) == []
    assert index.first_name("a") is None
    assert len(index._identities) == 1


def test_names_per_adapter_are_limited() -> None:
    index = AdapterNameIndex()
    index.add("shared", POET)
    copies = [AdapterKey("local", f"bard-{number}") for number in range(100)]
    for name in copies:
        index.add("shared", name)
        index.add("shared", BARD)  # recently used names are kept
    assert len(list(index.names_of("shared"))) == len(index._identities) == MAX_NAMES_PER_ADAPTER
    assert index.first_name("shared") == POET
    assert index.latest_identity(POET) == index.latest_identity(BARD) == index.latest_identity(copies[-1]) == "shared"
    assert index.latest_identity(copies[1]) == ""


def test_pinned_name_is_not_evicted_by_copies() -> None:
    index = AdapterNameIndex()
    index.add("shared", POET)
    index.add("shared", BARD)
    index.pin("shared", BARD)
    for copy in range(2 * MAX_NAMES_PER_ADAPTER):
        index.add("shared", AdapterKey("hub", f"owner/copy-{copy}"))
    assert index.identities_of(BARD) == ["shared"]
    assert len(list(index.names_of("shared"))) == MAX_NAMES_PER_ADAPTER
