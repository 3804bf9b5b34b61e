"""Suggestions for unknown adapter names."""

from typing import Any

import pytest

from lorax_server.server.access import model_names
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import MAX_PATTERN_CHECKS, NUM_SUGGESTIONS, ModelNames, suggest_names

MANY = ["poet", "poet-german", "pirate", "tutor", "sql-writer", "team/secret-poet", "Überset\u00adzer"]


def make(folder: list[str] = MANY, **options: Any) -> ModelNames:
    names = ModelNames("org/base-model", ("pretty",), **options)
    names.set_folder_names(folder)
    names.add_alias("bard", "s3", "team/bard-7")
    return names


@pytest.mark.parametrize(
    ("wanted", "best"),
    [
        ("peot", "poet"),
        ("poett", "poet"),
        ("POET2", "poet"),
        ("poet-germn", "poet-german"),
        ("tuter", "tutor"),
        ("sqlwriter", "sql-writer"),
        ("brad", "bard"),
        ("prety", "pretty"),
        ("org/base-modle", "org/base-model"),
        ("org/base-model:peot", "poet"),
        ("peot@v2", "poet"),
        ("pirat\0", "pirate"),
    ],
)
def test_misspelled_name_gets_suggestion(wanted: str, best: str) -> None:
    assert suggest_names(wanted, None, make(), Key())[0] == best


@pytest.mark.parametrize("wanted", ["", "zzzzzzzz", "x", "p" * 10_000, "../../etc/passwd", "\ud800", "@", "poet"])
def test_dissimilar_name_gets_no_suggestion(wanted: str) -> None:
    assert "poet" not in suggest_names(wanted, None, make(), Key())


def test_number_of_suggestions_is_limited() -> None:
    names = make([f"adapter-{n}" for n in range(50)])
    assert len(suggest_names("adapter-1", None, names, Key())) == NUM_SUGGESTIONS


def test_suggestions_contain_only_allowed_names() -> None:
    key = Key("k", adapters=("p*", "sql-writer"), base_model=False)
    names = make(default_source="local")
    assert suggest_names("peot", None, names, key) == ["poet"]
    assert suggest_names("secret-poet", None, names, key) == []
    assert "team/secret-poet" in suggest_names("secret-poet", None, names, Key())
    assert "pretty" not in suggest_names("prety", None, names, key)  # the base model


def test_suggestions_come_from_requested_source() -> None:
    assert suggest_names("team/bard", "s3", make(), Key()) == ["team/bard-7"]
    assert suggest_names("brad", "s3", make(), Key("k", adapters=("hub:*",))) == []
    assert suggest_names("peot", "local", make(), Key())[0] == "poet"


def test_snapshot_is_built_on_watcher_thread() -> None:
    names = ModelNames("base")
    names.set_folder_names(["poet"])
    snapshot = names.snapshot
    assert {"names", "adapter_keys"} <= vars(snapshot).keys()


def test_many_patterns_reduce_number_of_compared_names(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def may_use(*named: Any) -> bool:
        looks.append(named)
        return False

    monkeypatch.setattr(Key, "may_use", may_use)
    names = make([f"adapter-{number}" for number in range(3000)])
    assert suggest_names("adapter-x", None, names, Key("k", adapters=("a",) * 500)) == []
    assert len(looks) <= 2 * MAX_PATTERN_CHECKS / 500
    looks.clear()
    suggest_names("adapter-x", None, names, Key("k", adapters=("a",)))
    assert len(looks) <= MAX_PATTERN_CHECKS


def test_alphabetically_closest_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "MAX_COMPARED_NAMES", 20)
    names = make([f"adapter-{number:06}" for number in range(300)])
    assert suggest_names("adapter-00025", None, names, Key())[0].startswith("adapter-00025")
    assert suggest_names("adapter-00029x", None, names, Key())
    assert suggest_names("adapter-00000x", None, names, Key())
