import threading
from pathlib import Path
from typing import Any

import pytest

from lorax_server.errors import AdapterNotFoundError, InputError
from lorax_server.server.access import model_names as names_module
from lorax_server.server.access.model_names import BASE_MODEL, AdapterKey, ModelNames, ModelSelection
from lorax_server.types import AdapterRef, Merge

BASE = "org/base-model"
STATIC = ("local", "house-style")


def make(**options: Any) -> ModelNames:
    names = ModelNames(BASE, ("pretty", "short", "short:one"), **options)
    names.set_folder_names(["poet", "with:colon", "dotted.name"])
    names.add_alias("tutor", "s3", "team/tutor-7")
    return names


def place(selection: ModelSelection) -> AdapterKey:
    """Return the key of the only selected adapter."""
    (ref,) = selection.refs
    return AdapterKey(ref.source, ref.name)


# --- The base model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["", BASE, "pretty", "short:one", f"{BASE}:", "pretty:", BASE_MODEL, f"pretty:{BASE_MODEL}"]
)
def test_base_model_names_select_base_model(model: str) -> None:
    assert make().select_model(model, None, None) == ModelSelection()


@pytest.mark.parametrize("adapter_id", [None, "", BASE_MODEL, BASE, "pretty", "short:one"])
def test_empty_adapter_id_selects_base_model(adapter_id: str | None) -> None:
    assert make().select_adapter_id(adapter_id, None, None) == ModelSelection()
    assert make().select_adapter_id(adapter_id, "s3", "token") == ModelSelection()


def test_first_served_name_is_primary() -> None:
    assert make().primary_name == "pretty"
    assert ModelNames(BASE).primary_name == BASE


def test_static_adapter_replaces_base_model() -> None:
    names = make(static_adapter=STATIC)
    expected = ModelSelection((AdapterRef(*STATIC),), None, "house-style", (AdapterKey(*STATIC),))
    assert expected.source == "local"
    for model in ("", BASE, "pretty"):
        assert names.select_model(model, None, "token") == expected  # the caller's token is not passed
    for adapter_id in (None, "", BASE_MODEL, BASE):
        assert names.select_adapter_id(adapter_id, None, None) == expected
    assert place(names.select_model("poet", None, None)) == ("local", "poet")


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("poet", ("local", "poet")),
        ("tutor", ("s3", "team/tutor-7")),
        ("tutor@v2", ("s3", "team/tutor-7@v2")),
        ("with:colon", ("local", "with:colon")),
        (f"{BASE}:poet", ("local", "poet")),
        (f"{BASE}:with:colon", ("local", "with:colon")),
        ("pretty:tutor@v2", ("s3", "team/tutor-7@v2")),
        ("short:one:poet", ("local", "poet")),
        ("owner/name", ("hub", "owner/name")),
        ("owner/name@main", ("hub", "owner/name@main")),
        ("owner/name@refs/pr/1", ("hub", "owner/name@refs/pr/1")),
        (f"{BASE}:owner/name", ("hub", "owner/name")),
    ],
)
def test_model_selects_adapter(model: str, expected: tuple[str, str]) -> None:
    selection = make().select_model(model, None, "token")
    assert place(selection) == expected
    assert selection.refs[0].token == "token"
    assert selection.source == expected[0]


def test_model_path_is_served_under_its_folder_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    names = ModelNames(str(folder))
    assert (names.primary_name, names.listed_base_names) == ("my-model", ("my-model",))
    for name in ("my-model", str(folder), f"{folder}:", ""):
        assert names.select_model(name, None, None) == ModelSelection()
    for name in ("my-model:owner/poet", f"{folder}:owner/poet"):
        assert place(names.select_model(name, None, None)) == ("hub", "owner/poet")
    assert ModelNames(f"{folder}/").primary_name == "my-model"
    assert ModelNames(str(folder), ("pretty",)).listed_base_names == ("pretty",)
    assert ModelNames(str(tmp_path / "missing")).primary_name == str(tmp_path / "missing")
    (tmp_path / "tiny.gguf").touch()
    assert ModelNames(str(tmp_path / "tiny.gguf")).primary_name == "tiny"


def test_relative_model_path_is_served_under_its_folder_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert ModelNames(".").primary_name == "my-model"


def test_listed_name_takes_precedence_over_base_prefix() -> None:
    names = make()
    names.add_alias("pretty:poet", "local", "another")
    assert place(names.select_model("pretty:poet", None, None)) == ("local", "another")
    assert names.select_model("pretty", None, None) == ModelSelection()


def test_requested_source_overrides_listed_name() -> None:
    names = make()
    assert place(names.select_adapter_id("poet", "S3", None)) == ("s3", "poet")
    assert place(names.select_model("anything goes", "local", None)) == ("local", "anything goes")
    assert place(names.select_adapter("tutor", "hub")) == ("hub", "tutor")
    assert place(names.select_adapter("tutor", None)) == ("s3", "team/tutor-7")


def test_access_is_checked_for_requested_name() -> None:
    """Permissions apply to the listed name, or to the adapter key if the request sets a source."""
    names = make()
    assert names.select_adapter_id("tutor", None, None).access_keys == (AdapterKey("hub", "tutor"),)
    assert names.select_adapter_id("tutor@v2", None, None).access_keys == (AdapterKey("hub", "tutor@v2"),)
    assert names.select_adapter_id("team/tutor-7", "s3", None).access_keys == (AdapterKey("s3", "team/tutor-7"),)
    assert names.select_adapter_id("tutor", None, None).label == "tutor"


def test_merged_adapters_keep_their_order() -> None:
    merge = Merge((0.5, 0.5))
    selection = make().select_merged_adapters(["tutor", "owner/name"], merge, None, "token")
    assert selection.refs == (AdapterRef("s3", "team/tutor-7", "token"), AdapterRef("hub", "owner/name", "token"))
    assert selection.merge is merge
    assert selection.label == "tutor,owner/name"
    assert selection.access_keys == (AdapterKey("hub", "tutor"), AdapterKey("hub", "owner/name"))


@pytest.mark.parametrize("name", ["poet", "./poet", "poet/", "poet//", "/srv/poet", "/srv/./poet/"])
def test_spellings_of_local_path_select_same_adapter(name: str) -> None:
    """Every spelling has the same label, permission and adapter key."""
    names = make(default_source="local", roots=[Path("/srv"), Path("/more")])
    expected = ModelSelection((AdapterRef("local", "poet"),), None, "poet", (AdapterKey("local", "poet"),))
    for selection in (
        names.select_model(name, None, None),
        names.select_adapter_id(name, None, None),
        names.select_adapter(name, None),
    ):
        assert selection == expected
    assert names.select_adapter_id(name, "LOCAL", None) == expected._replace(requested_source="local")
    assert names.select_merged_adapters([name, "tutor"], Merge((1.0, 1.0)), None, None).label == "poet,tutor"
    names.add_alias("bard", "local", name)
    assert names.adapters["bard"] == ("local", "poet")
    assert make(static_adapter=("local", name), roots=[Path("/srv")]).base_selection.label == "poet"


def test_only_local_paths_inside_roots_are_normalized() -> None:
    names = make()
    assert place(names.select_adapter_id("owner//name/", "hub", None)) == ("hub", "owner//name/")
    assert place(names.select_adapter_id("./key/", "s3", None)) == ("s3", "./key/")
    assert place(make(default_source="local").select_adapter("../poet", None)) == ("local", "../poet")


def test_alias_is_matched_before_normalization() -> None:
    names = make(default_source="local")
    names.add_alias("./poet", "s3", "team/poet")
    assert place(names.select_adapter_id("./poet", None, None)) == ("s3", "team/poet")
    assert place(names.select_adapter_id("poet/", None, None)) == ("local", "poet")


def test_folder_named_like_base_model_is_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    """The name selects the base model. The load route can assign an alias to the folder."""
    names = ModelNames("base", ("pretty",), default_source="local")
    names.set_folder_names(["base", "pretty", BASE_MODEL, "poet"])
    assert list(names.adapters) == ["poet"]
    assert [each.args for each in caplog.records] == [(BASE_MODEL,), ("base",), ("pretty",)]
    for name in ("base", "./base", "pretty/", BASE_MODEL):
        assert names.select_adapter_id(name, None, None) == names.select_model(name, None, None) == ModelSelection()
    names.add_alias("other", "local", "base")
    assert place(names.select_model("other", None, None)) == ("local", "base")


# --- Missing adapters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        *("gpt-4", "poet ", "Poet", "a/b/c", "/", "a/", "/b", "owner/na me", "owner/name\n", "owner/name@", "ü/b"),
        *("../../etc/passwd", "owner\\name", "\x00", f"{BASE}:nobody", "poet2@v1", "@", ":", ":poet", "nobody:poet"),
    ],
)
def test_invalid_hub_name_is_rejected_without_lookup(model: str) -> None:
    with pytest.raises(AdapterNotFoundError, match="does not exist; use a name from /v1/models"):
        make().select_model(model, None, None)


def test_non_hub_sources_accept_any_name() -> None:
    names = make(default_source="local")
    assert place(names.select_model("gpt-4", None, None)) == ("local", "gpt-4")
    assert names.select_adapter_id("gpt-4", None, None).access_keys == (AdapterKey("local", "gpt-4"),)


def test_hostile_name_is_truncated_and_escaped_in_error() -> None:
    with pytest.raises(AdapterNotFoundError) as raised:
        make().select_model("\x1b[2J\n" + "x" * 10_000, None, None)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 400


def test_unknown_model_error_lists_no_names() -> None:
    """The error lists no names, because the key may not be allowed to use them."""
    with pytest.raises(AdapterNotFoundError) as raised:
        make().select_model("nobody", None, None)
    assert "poet" not in str(raised.value)
    assert "tutor" not in str(raised.value)


# --- Names that come and go -------------------------------------------------------------------------------------------


def test_aliases_are_added_and_removed() -> None:
    names = make()
    assert names.adapters["tutor"] == ("s3", "team/tutor-7")
    names.add_alias("tutor", "hub", "owner/tutor")
    assert place(names.select_model("tutor", None, None)) == ("hub", "owner/tutor")
    assert names.remove_alias("tutor")
    assert not names.remove_alias("tutor")
    assert not names.remove_alias("poet")  # folder names cannot be removed
    with pytest.raises(AdapterNotFoundError):
        names.select_model("tutor", None, None)


def test_alias_hides_folder_name() -> None:
    names = make()
    names.add_alias("poet", "hub", "owner/poet")
    assert place(names.select_model("poet", None, None)) == ("hub", "owner/poet")
    names.remove_alias("poet")
    assert place(names.select_model("poet", None, None)) == ("local", "poet")
    names.set_folder_names([])
    with pytest.raises(AdapterNotFoundError):
        names.select_model("poet", None, None)


def test_absolute_path_ignores_alias() -> None:
    names = ModelNames(BASE, (), "local", roots=[Path("/ads")])
    names.set_folder_names(["poet", "v2"])
    names.add_alias("poet", "local", "v2")
    assert names.select_adapter("poet", None).refs[0].name == "v2"
    assert names.select_adapter("/ads/poet", None).refs[0].name == "poet"


@pytest.mark.parametrize("alias", ["", "x\ny", "\x00", "a" * 513, BASE, "pretty", "__base_model__"])
def test_invalid_alias_is_rejected(alias: str) -> None:
    names = make()
    with pytest.raises(InputError, match=r"printable characters|is a base model name"):
        names.add_alias(alias, "hub", "a/b")
    assert alias not in names.adapters


def test_number_of_aliases_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "MAX_ALIASES", 2)
    names = make()
    names.add_alias("second", "hub", "a/b")
    with pytest.raises(InputError, match="unload some"):
        names.add_alias("third", "hub", "a/b")
    names.add_alias("second", "hub", "a/c")  # an existing alias can be changed
    names.remove_alias("tutor")
    names.add_alias("third", "hub", "a/b")


def test_folder_names_can_be_set_from_another_thread() -> None:
    names, is_done = make(), threading.Event()

    def change() -> None:
        for i in range(300):
            names.set_folder_names([f"one-{i}", f"two-{i}"])
        is_done.set()

    changing = threading.Thread(target=change)
    changing.start()
    while not is_done.is_set():
        folder = [name for name in names.adapters if name.startswith(("one-", "two-"))]
        assert len({name.partition("-")[2] for name in folder}) <= 1  # both from the same snapshot
    changing.join()
