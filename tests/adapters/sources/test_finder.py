"""Resolve adapters in folders that other programs change concurrently."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lorax_server.adapters.sources import finder
from lorax_server.adapters.sources.finder import AdapterFinder, FoundAdapter
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterFiles, AdapterSources
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.adapter_files import TEMPLATES_FOLDER
from lorax_server.files.names import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import read_stamp
from lorax_server.types import AdapterRef
from tests.adapters.test_checkpoint import entry, file_bytes

TEMPLATE = f"{TEMPLATES_FOLDER}/tools.jinja"
FILES = [CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE, TEMPLATE]


def write(folder: Path, text: str) -> Path:
    """Write an adapter whose files contain the given text."""
    (folder / TEMPLATES_FOLDER).mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q"], "revision": text}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    data = text.encode().ljust(32)
    (folder / WEIGHTS_FILE).write_bytes(file_bytes({"q": entry([2, 4], 0, 32)}, data))
    for file in (TEMPLATE_FILE, TEMPLATE):
        (folder / file).write_text(text)
    return folder


def ignore() -> None:
    pass


class HookedSource(LocalSource):
    """A source with hooks before and after each file access."""

    before: Callable[[], None] = staticmethod(ignore)
    after_config: Callable[[], None] = staticmethod(ignore)
    after: Callable[[], None] = staticmethod(ignore)

    def find(self, name: str, token: str | None) -> AdapterFiles:
        self.before()
        return super().find(name, token)

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        self.before()
        folder = super().fetch(files, wanted, token)
        (self.after_config if list(wanted) == [CONFIG_FILE] else self.after)()
        return folder


class PathSwap:
    """Replace a path inside the root by a link to the outside, and restore it."""

    def __init__(self, path: Path, outside: Path) -> None:
        self.path, self.outside = path, outside
        self.aside = path.parent / "aside"

    def put_in(self) -> None:
        os.rename(self.path, self.aside)
        self.path.symlink_to(self.outside)

    def put_back(self) -> None:
        if self.aside.exists():
            self.path.unlink()
            os.rename(self.aside, self.path)

    @contextmanager
    def during(self) -> Iterator[None]:
        self.put_in()
        try:
            yield
        finally:
            self.put_back()


def find(source: LocalSource, name: str = "poet") -> FoundAdapter:
    sources = AdapterSources({"local": source}, max_bytes=2**30)
    finder = AdapterFinder(sources, model_type="llama", model_class="LlamaForCausalLM")
    return finder.find(AdapterRef("local", name))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "outside", "secret")
    write(tmp_path / "root" / "poet", "plain")
    return tmp_path / "root"


def swap_at(root: Path, what: str) -> PathSwap:
    path = root / "poet" / what
    return PathSwap(path, root.parent / "outside" / what)


def read_stamped_files(found: FoundAdapter, root: Path) -> dict[str, bytes]:
    """Return the contents of the stamped files, which must be inside the root."""
    names = [path for path, stamp in found.files.items() if stamp is not None and path.is_file()]
    assert all(path.is_relative_to(root) and not path.is_symlink() for path in names)
    return {str(path.relative_to(root / "poet")): path.read_bytes() for path in names}


@pytest.mark.parametrize("what", [*FILES, TEMPLATES_FOLDER, ""], ids=lambda what: what or "the folder")
@pytest.mark.parametrize("times", [1, 100])
def test_file_replaced_after_validation_is_not_accepted(root: Path, what: str, times: int) -> None:
    """Replace the file between the source's last check and the stamps in the result, then restore it."""
    swap, source = swap_at(root, what), HookedSource([root])
    left = iter(range(times))
    source.before = swap.put_back
    source.after = lambda: swap.put_in() if next(left, None) is not None else None
    if times > finder.MAX_ATTEMPTS:
        with pytest.raises(SourceError, match=r"'poet'.* changed while it was read; try again"):
            find(source)
        return
    result = find(source)
    assert next(left, None) is None
    assert result.spec.identity == find(LocalSource([root])).spec.identity
    assert all(b"secret" not in content for content in read_stamped_files(result, root).values())
    assert result.resolved.tokenizer_stamps == tuple(
        read_stamp(root / "poet" / file) for file in result.resolved.tokenizer_files
    )


def test_config_replaced_after_validation_is_not_parsed(root: Path) -> None:
    swap, source, seen = swap_at(root, ""), HookedSource([root]), []
    source.before, source.after_config = swap.put_back, swap.put_in
    sources = AdapterSources({"local": source}, max_bytes=2**30)
    with pytest.raises(SourceError, match=f"'poet': {CONFIG_FILE} changed while it was read; try again"):
        sources.fetch("local", "poet", None, lambda config, _: seen.append(config))
    assert not seen


@pytest.mark.parametrize("reader", ["read_header", "compute_identity", "read_json"])
def test_identity_uses_validated_file(root: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    """Replace the folder only while it is read. Checks before and after see the original."""
    swap, read = swap_at(root, ""), getattr(finder, reader)

    def read_outside(*args: Any) -> Any:
        with swap.during():
            return read(*args)

    monkeypatch.setattr(finder, reader, read_outside)
    with pytest.raises(SourceError, match=r"'poet'.* changed while it was read; try again"):
        find(LocalSource([root]))


# --- Roots ------------------------------------------------------------------------------------------------------------


def test_later_roots_are_not_accessed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accessing a later root could block, because its file system may hang."""
    later = root.parent / "later"
    write(later / "poet", "later")
    looked: list[str] = []

    def look(real: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        looked.append(str(path))
        return real(path, *args, **options)

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, partial(look, getattr(os, name)))
    result = find(LocalSource([root, later]))
    assert result.is_unchanged()
    assert any(path.startswith(str(root)) for path in looked)
    assert not [path for path in looked if path.startswith(str(later))]


def test_adapter_is_found_in_later_root_after_deletion(root: Path) -> None:
    later, missing = root.parent / "later", root.parent / "missing"
    write(later / "poet", "later")
    source = LocalSource([missing, root, later])
    result = find(source)
    shutil.rmtree(root / "poet")
    assert not result.is_unchanged()
    moved = find(source)
    assert moved.spec.identity != result.spec.identity
    write(missing / "poet", "the first of all")
    assert not moved.is_unchanged()


def test_found_adapter_tracks_both_roots_after_deletion_during_resolution(root: Path) -> None:
    later = root.parent / "later"
    write(later / "poet", "later")
    source = HookedSource([root, later])
    source.before = lambda: shutil.rmtree(root / "poet", ignore_errors=True)
    result = find(source)
    assert {root / "poet", later / "poet"} <= set(result.files)


@pytest.mark.parametrize("name", ["{first}/poet", "linked", "poet"])
def test_changed_root_symlink_is_detected(tmp_path: Path, name: str) -> None:
    """Test an absolute name, a name that links out of the new root, and a name missing in the new root."""
    first, second, root = tmp_path / "first", tmp_path / "second", tmp_path / "root"
    write(first / "poet", "first")
    second.mkdir()
    for each in (first, second):
        (each / "linked").symlink_to(first / "poet")
    root.symlink_to(first)
    source, name = LocalSource([root]), name.format(first=first)
    result = find(source, name=name)
    write(first / "another", "unrelated")
    assert result.is_unchanged()
    (tmp_path / "new").symlink_to(second)
    os.replace(tmp_path / "new", root)
    assert not result.is_unchanged()
    with pytest.raises(AdapterError, match="such links are not allowed" if name == "linked" else "no such folder"):
        find(source, name=name)
