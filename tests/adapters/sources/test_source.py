import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lorax_server.adapters.sources import source as source_module
from lorax_server.adapters.sources.source import AdapterFiles, AdapterSources, Source, read_json
from lorax_server.errors import AdapterAccessError, AdapterError, SourceError
from tests.adapters.sources.adapters import ADAPTER, CONFIG, WEIGHTS, accept, check_contents
from tests.adapters.sources.child import run_child


class FakeSource(Source):
    """A source that serves files from a folder and records calls."""

    kind = "fake"

    def __init__(self, folder: Path, files: Mapping[str, bytes] = ADAPTER) -> None:
        self.folder = folder
        self.calls: list[tuple[Any, ...]] = []
        self.sizes = {file: len(content) for file, content in files.items()}
        self.error: Exception | None = None
        self.types: dict[str, str] = {}
        for file, content in files.items():
            (folder / file).write_bytes(content)

    def authorize(self, name: str, token: str | None) -> None:
        self.calls.append(("authorize", name, token))
        if self.error:
            raise self.error

    def find(self, name: str, token: str | None) -> AdapterFiles:
        self.calls.append(("find", name, token))
        return AdapterFiles(self.kind, name, "1", self.sizes)

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        self.calls.append(("fetch", *wanted))
        return self.folder

    def base_model_type(self, name: str, token: str | None) -> str | None:
        self.calls.append(("base", name, token))
        return self.types.get(name)


@pytest.fixture
def source(tmp_path: Path) -> FakeSource:
    return FakeSource(tmp_path)


def front(source: FakeSource, **options: Any) -> AdapterSources:
    sources: dict[str, Source] = {"fake": source}
    return AdapterSources(sources, **{"max_bytes": 2**30} | options)


def called_methods(source: FakeSource) -> list[str]:
    return [call[0] for call in source.calls]


# --- call order


def test_fetch_calls_source_in_order(source: FakeSource) -> None:
    fetched = front(source).fetch("fake", "name", "token", accept)
    check_contents(fetched)
    assert (fetched.folder, fetched.version) == (source.folder, "1")
    assert source.calls == [
        ("authorize", "name", "token"),
        ("find", "name", "token"),
        ("fetch", "adapter_config.json"),
        ("fetch", *ADAPTER),
    ]


def test_config_is_checked_before_weights_download(source: FakeSource) -> None:
    seen = []

    def refuse(config: Mapping[str, Any], base_model_type: Callable[[str], str | None]) -> None:
        seen.append(config)
        raise AdapterError("not for us")

    with pytest.raises(AdapterError, match="not for us"):
        front(source).fetch("fake", "name", None, refuse)
    assert seen == [CONFIG]
    assert source.calls[-1] == ("fetch", "adapter_config.json")


def test_unknown_source_lists_enabled_sources(source: FakeSource) -> None:
    sources = AdapterSources({"fake": source, "another": source}, max_bytes=1)
    with pytest.raises(AdapterError, match="'name': source 'ftp' is not enabled; use one of another, fake"):
        sources.fetch("ftp", "name", None, accept)
    assert not source.calls


@pytest.mark.parametrize(
    "name",
    ["", "x" * 513, "a\0b", "a\nb", "a\rb", "a\tb", "\x1b[31m", "a\x7f", "a\u2028b", "\u202ea", "\ud800", "a\u200bb"],
)
def test_invalid_name_is_rejected(source: FakeSource, name: str) -> None:
    with pytest.raises(AdapterError, match="a name must have 1 to 512 printable characters") as caught:
        front(source).fetch("fake", name, None, accept)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert not source.calls


def test_unicode_names_are_valid(source: FakeSource) -> None:
    for name in ("x" * 512, "ein name", "größe", "模型/适配器", "owner/name@main"):
        check_contents(front(source).fetch("fake", name, None, accept))


@pytest.mark.parametrize("token", ["a\nb", "a\r\nX-Other: header", "a\0", "ä", "\x1b"])
def test_invalid_token_is_rejected_and_not_shown(source: FakeSource, token: str) -> None:
    with pytest.raises(AdapterAccessError, match="'name': the token contains invalid characters") as caught:
        front(source).fetch("fake", "name", token, accept)
    assert token not in str(caught.value)
    assert not source.calls


def test_empty_token_is_ignored(source: FakeSource) -> None:
    front(source).fetch("fake", "name", "", accept)
    assert source.calls[0] == ("authorize", "name", None)


# --- authorization


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_authorization_is_cached_until_ttl(source: FakeSource) -> None:
    clock = Clock()
    sources = front(source, authorization_ttl_s=60, clock=clock)
    for clock.now, num_authorizations in ((0, 1), (59, 1), (60, 2), (119, 2), (121, 3)):
        sources.fetch("fake", "name", "token", accept)
        assert called_methods(source).count("authorize") == num_authorizations


def test_cached_authorization_is_per_name_and_token(source: FakeSource) -> None:
    sources = front(source)
    sources.fetch("fake", "name", "token", accept)
    source.error = AdapterAccessError("no")
    sources.fetch("fake", "name", "token", accept)
    for name, token in (("name", None), ("name", "other"), ("other", "token"), ("name@main", "token")):
        with pytest.raises(AdapterAccessError):
            sources.fetch("fake", name, token, accept)


def test_cached_authorization_is_per_source(source: FakeSource) -> None:
    sources = AdapterSources({"fake": source, "other": source}, max_bytes=2**30)
    sources.fetch("fake", "name", None, accept)
    sources.fetch("other", "name", None, accept)
    assert called_methods(source).count("authorize") == 2


@pytest.mark.parametrize("error", [AdapterAccessError("no"), SourceError("down")])
def test_denied_access_is_not_cached(source: FakeSource, error: AdapterError) -> None:
    sources = front(source)
    source.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            sources.fetch("fake", "name", None, accept)
    assert called_methods(source) == ["authorize", "authorize"]
    source.error = None
    check_contents(sources.fetch("fake", "name", None, accept))


def test_authorization_cache_is_bounded(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_AUTHORIZATIONS", 3)
    sources = front(source)
    for name in ("a", "b", "c", "a", "d"):
        sources.fetch("fake", name, None, accept)
    assert [name for _, name, _ in sources._authorizations] == ["a", "c", "d"]


def test_tokens_are_not_stored(source: FakeSource) -> None:
    sources = front(source)
    sources.fetch("fake", "name", "hf_secret", accept)
    assert "hf_secret" not in repr(vars(sources._authorizations))


# --- required files and limits


@pytest.mark.parametrize("pickle", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_pickle_files_are_never_opened(source: FakeSource, pickle: str) -> None:
    source.sizes = {"adapter_config.json": 10, pickle: 10}
    with pytest.raises(AdapterError, match=f"'name': has {pickle} but no {WEIGHTS}; pickle files are not supported"):
        front(source).fetch("fake", "name", None, accept)
    assert called_methods(source) == ["authorize", "find"]


def test_medusa_heads_are_rejected(source: FakeSource) -> None:
    (source.folder / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    source.sizes = {"config.json": 50, "medusa_lm_head.safetensors": 10}
    with pytest.raises(AdapterError, match=r"'name': has Medusa heads but no LoRA adapter.* --draft-heads"):
        front(source).fetch("fake", "name", None, accept)


@pytest.mark.parametrize(
    ("sizes", "missing"),
    [
        ({}, "no adapter_config.json and no adapter_model.safetensors"),
        ({"adapter_config.json": 10}, "no adapter_model.safetensors"),
        ({WEIGHTS: 10, "adapter_model.bin": 10}, "no adapter_config.json"),
    ],
)
def test_error_names_missing_files(source: FakeSource, sizes: dict[str, int], missing: str) -> None:
    source.sizes = sizes
    with pytest.raises(AdapterError, match=f"'name': has {missing}; save the adapter with PEFT"):
        front(source).fetch("fake", "name", None, accept)
    assert called_methods(source) == ["authorize", "find"]


@pytest.mark.parametrize(
    ("file", "size", "limit"),
    [
        ("adapter_config.json", 2**20 + 1, 2**20),
        ("tokenizer.json", 2**26 + 1, 2**26),
        ("chat_template.jinja", 2**20 + 1, 2**20),
        ("additional_chat_templates/tool_use.jinja", 2**20 + 1, 2**20),
        ("tekken.json", 2**26 + 1, 2**26),
        ("tokenizer.json", -1, 2**26),
        (WEIGHTS, 2**30 + 1, 2**30),
    ],
)
def test_large_file_is_rejected_before_download(source: FakeSource, file: str, size: int, limit: int) -> None:
    source.sizes[file] = size
    with pytest.raises(AdapterError, match=f"'name': {file} has {size} bytes, at most {limit} are allowed"):
        front(source).fetch("fake", "name", None, accept)
    assert called_methods(source) == ["authorize", "find"]


def test_total_file_size_is_limited(source: FakeSource) -> None:
    total = sum(source.sizes.values())
    source.sizes["config.json"] = source.sizes["adapter_model.bin"] = 2**40  # ignored and not counted
    check_contents(front(source, max_bytes=total).fetch("fake", "name", None, accept))
    source.calls.clear()
    with pytest.raises(AdapterError, match=f"'name': the files have {total} bytes, at most {total - 1} are allowed"):
        front(source, max_bytes=total - 1).fetch("fake", "name", None, accept)
    assert called_methods(source) == ["authorize", "find"]


def test_fetch_is_logged(source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    front(source, clock=Clock()).fetch("fake", "name", "hf_secret", accept)
    total = sum(map(len, ADAPTER.values()))
    assert caplog.messages == [f"adapter 'name' of source fake: {total} bytes in 0.0 s"]


# --- base models


def find_base_model_type(sources: AdapterSources, source: str, token: str | None, base: str) -> str | None:
    answers: list[str | None] = []
    sources.fetch(source, "name", token, lambda _, base_model_type: answers.append(base_model_type(base)))
    return answers[0]


def test_base_model_lookup_starts_with_adapter_source(tmp_path: Path, source: FakeSource) -> None:
    (tmp_path / "other").mkdir()
    other = FakeSource(tmp_path / "other")
    source.types, other.types = {"both": "llama", "here": "opt"}, {"both": "mistral", "there": "gpt2"}
    sources = AdapterSources({"other": other, "fake": source}, max_bytes=2**30)
    assert find_base_model_type(sources, "fake", "token", "both") == "llama"
    assert find_base_model_type(sources, "fake", "token", "here") == "opt"
    assert find_base_model_type(sources, "fake", "token", "there") == "gpt2"
    assert find_base_model_type(sources, "fake", "token", "nowhere") is None
    assert ("base", "here", "token") in source.calls
    # The token must not be sent to other sources.
    assert {call[2] for call in other.calls} == {None}


def test_invalid_base_model_name_is_not_looked_up(source: FakeSource) -> None:
    for base in ("", "x" * 1000, "a\nb"):
        assert find_base_model_type(front(source), "fake", None, base) is None
    assert "base" not in called_methods(source)


# --- JSON


def refuse_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(AdapterError, match=re.escape(message)) as caught:
        read_json(tmp_path / "x.json", "adapter 'name'")
    assert str(caught.value).startswith("adapter 'name': x.json is invalid: ")
    assert len(str(caught.value)) < 500


BAD_JSON = {
    "a list": (b"[1, 2]", "not a JSON object"),
    "a number": (b"3", "not a JSON object"),
    "a string": (b'"x"', "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "empty": (b"", "Expecting value"),
    "cut": (b'{"a": ', "Expecting value"),
    "more after it": (b"{} {}", "Extra data"),
    "comments": (b"{} // x", "Extra data"),
    "not UTF-8": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "can't decode byte"),
    "UTF-32": ('{"a": 1}'.encode("utf-32-le"), "Expecting"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "the same key twice": (b'{"r": 8, "r": 16}', "it has duplicate keys"),
    "the same key twice, spelled differently": (b'{"r": 8, "\\u0072": 16}', "it has duplicate keys"),
    "the same key twice, further in": (b'{"a": [{"r": 8, "r": 16}]}', "it has duplicate keys"),
    "NaN": (b'{"a": NaN}', "NaN is not a finite number"),
    "Infinity": (b'{"a": Infinity}', "Infinity is not a finite number"),
    "-Infinity": (b'{"a": [-Infinity]}', "-Infinity is not a finite number"),
    "a float that overflows": (b'{"a": 1e999}', "1e999 is not a finite number"),
    "a long float that overflows": (b'{"a": ' + b"9" * 4000 + b".0}", "is not a finite number"),
    "an integer of many digits": (b'{"a": ' + b"9" * 100_000 + b"}", "digits"),
    "nested deeper than we allow": (b'{"a": ' * 33 + b"1" + b"}" * 33, "nested deeper than 32"),
    "lists nested deeper than we allow": (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nested deeper than 32"),
    "nested deeper than Python allows": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "objects nested deeper than Python allows": (b'{"a":' * 100_000, "nested too deeply"),
    "2 MiB": (json.dumps({"a": "x" * 2**21}).encode(), "larger than 1048576 bytes"),
    "control characters": (b'{"a": "\n"}', "Invalid control character"),
}


@pytest.mark.parametrize(("content", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_invalid_json_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    refuse_json(tmp_path, content, message)


def test_valid_json_is_read(tmp_path: Path) -> None:
    good = {"a": 1, "b": -1.5e3, "c": [None, True, {"d": "größe"}], "e": "x" * (2**20 - 100)}
    (tmp_path / "x.json").write_text(json.dumps(good, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "x.json", "adapter 'name'") == good
    nested = b'{"a": ' * 31 + b"1" + b"}" * 31
    (tmp_path / "x.json").write_bytes(nested)
    assert read_json(tmp_path / "x.json", "adapter 'name'") == json.loads(nested)


def test_missing_file_error_does_not_show_path(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter 'name': x.json cannot be read: No such file") as caught:
        read_json(tmp_path / "x.json", "adapter 'name'")
    assert str(tmp_path) not in str(caught.value)


def test_invalid_config_downloads_no_weights(tmp_path: Path) -> None:
    source = FakeSource(tmp_path, {**ADAPTER, "adapter_config.json": b'{"r": 8, "r": 9}'})
    with pytest.raises(AdapterError, match=r"adapter 'name': adapter_config.json is invalid: it has duplicate keys"):
        front(source).fetch("fake", "name", None, accept)
    assert source.calls[-1] == ("fetch", "adapter_config.json")


# --- imports


def test_sources_import_neither_torch_nor_boto3() -> None:
    run_child(
        """
        import lorax_server.adapters.sources.source, lorax_server.adapters.sources.hub
        import lorax_server.adapters.sources.local, lorax_server.adapters.sources.s3
        assert not {"torch", "boto3", "botocore"} & set(sys.modules)
        """
    )
