import errno
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from lorax_server.adapters.sources.local import LocalSource, normalize_local_name
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError
from lorax_server.server.access.folder_watcher import find_adapters
from tests.adapters.sources.adapters import ADAPTER, UNRELATED_FILES, WEIGHTS, check_contents, fetch

CONFIG = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
TEMPLATE = f"{TEMPLATES}/default.jinja"
OTHER_FILES = ["vocab.txt", "spiece.model", "tekken.json", TEMPLATE]


def write(folder: Path, files: dict[str, bytes] = ADAPTER) -> Path:
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "root" / "team" / "adapter", ADAPTER | UNRELATED_FILES)
    return tmp_path / "root"


@pytest.fixture
def source(root: Path) -> LocalSource:
    return LocalSource([root])


# --- lookup


@pytest.mark.parametrize(
    "name", ["team/adapter", "team/adapter/", "./team/adapter", "team//adapter", "{root}/team/adapter"]
)
def test_adapter_is_used_in_place(source: LocalSource, root: Path, name: str) -> None:
    fetched = fetch(source, name.format(root=root))
    check_contents(fetched)
    assert fetched.folder == root / "team" / "adapter"


def test_token_is_ignored(source: LocalSource) -> None:
    check_contents(fetch(source, "team/adapter", "hf_any"))


def test_first_matching_root_is_used(tmp_path: Path, root: Path) -> None:
    write(tmp_path / "second" / "team" / "adapter", {**ADAPTER, WEIGHTS: b"second"})
    write(tmp_path / "second" / "other")
    source = LocalSource([root, tmp_path / "second"])
    check_contents(fetch(source, "team/adapter"))
    check_contents(fetch(source, "other"))
    check_contents(fetch(source, str(tmp_path / "second" / "team" / "adapter")), {**ADAPTER, WEIGHTS: b"second"})


def test_root_may_be_symlink(tmp_path: Path, root: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    source = LocalSource([tmp_path / "link"])
    check_contents(fetch(source, "team/adapter"))
    check_contents(fetch(source, str(tmp_path / "link" / "team" / "adapter")))


def test_links_inside_root_are_followed(root: Path, source: LocalSource) -> None:
    (root / "latest").symlink_to("team/adapter")
    check_contents(fetch(source, "latest"))
    linked = root / "linked"
    linked.mkdir()
    for file in ADAPTER:
        (linked / file).symlink_to(f"../team/adapter/{file}")
    check_contents(fetch(source, "linked"))


def test_symlinked_root_can_be_switched_atomically(tmp_path: Path, root: Path) -> None:
    new = {**ADAPTER, WEIGHTS: b"of the new folder"}
    write(tmp_path / "new" / "team" / "adapter", new)
    write(tmp_path / "new" / "only-here")
    link = tmp_path / "link"
    link.symlink_to(root)
    source = LocalSource([link])
    check_contents(fetch(source, "team/adapter"))
    result = source.find("team/adapter", None)
    (tmp_path / "other").symlink_to(tmp_path / "new")
    os.replace(tmp_path / "other", link)
    assert find_adapters(link).names == ["only-here"]  # the listing resolves the link too
    check_contents(fetch(source, "only-here"))
    for name in ("team/adapter", str(link / "team" / "adapter")):
        check_contents(fetch(source, name), new)
    with pytest.raises(SourceError, match="changed while they were read"):
        source.fetch(result, [WEIGHTS], None)  # never a mix of the old and the new adapter
    with pytest.raises(AdapterNotFoundError):
        fetch(source, str(root / "team" / "adapter"))  # no longer below a root


def test_source_without_roots_has_no_adapters(root: Path) -> None:
    with pytest.raises(AdapterNotFoundError):
        fetch(LocalSource([]), str(root / "team" / "adapter"))


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, "tokenizer.json", TEMPLATE, "vocab.txt"])
def test_file_change_changes_version(root: Path, source: LocalSource, file: str) -> None:
    path = root / "team" / "adapter" / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ADAPTER.get(file, b""))
    versions = {source.find("team/adapter", None).version}
    os.utime(path, ns=(1, 1))
    versions.add(source.find("team/adapter", None).version)
    path.write_bytes(ADAPTER.get(file, b"") + b" ")
    os.utime(path, ns=(1, 1))
    versions.add(source.find("team/adapter", None).version)
    # Replace the file by a copy with the same bytes, size and time.
    (root / "new").write_bytes(ADAPTER.get(file, b"") + b" ")
    os.utime(root / "new", ns=(1, 1))
    os.replace(root / "new", path)
    versions.add(source.find("team/adapter", None).version)
    assert len(versions) == 4
    assert source.find("team/adapter", None).version in versions


def test_unknown_files_do_not_change_version(root: Path, source: LocalSource) -> None:
    before = source.find("team/adapter", None)
    (root / "team" / "adapter" / "notes.txt").write_text("anything")
    assert source.find("team/adapter", None) == before


def test_change_during_fetch_fails(root: Path, source: LocalSource) -> None:
    result = source.find("team/adapter", None)
    (root / "team" / "adapter" / WEIGHTS).write_bytes(b"new")
    with pytest.raises(SourceError, match=r"team/adapter.* changed while they were read; try again"):
        source.fetch(result, [WEIGHTS], None)


# --- rejected paths


OUTSIDE = [
    "../outside",
    "../outside/",
    "team/../../outside",
    "team/adapter/../../../outside",
    "./../outside",
    "..",
    "../",
    "team/..",
    "team/adapter/..",
    "{root}/../outside",
    "{root}/team/../../outside",
    "{outside}",
    "{outside}/",
    "/{outside}",
    "{root}evil",
    "../rootevil",
    "/",
    "/etc",
    "//etc",
    "/etc/passwd",
    "/proc/self/cwd/",
    "/proc/self/root{outside}",
    "/dev/fd/0",
    "~",
    "~/outside",
    "~root/outside",
    "..\\outside",
    "\\..\\outside",
    "team\\..\\..\\outside",
    "C:\\outside",
    "%2e%2e/outside",
    "..%2foutside",
    "%2e%2e%2foutside",
    "..%252foutside",
    "..%c0%afoutside",
    "team/adapter%00",
    "file://{outside}",
    "file:{outside}",
    "file:///etc/passwd",
    "http://evil.example/adapter",
    "loop",
    "team/adapter/adapter_config.json",
    "$HOME/outside",
    "${{PWD}}/../outside",
    "team/adapter;../outside",
    "\u2025/outside",
    "\uff0e\uff0e/outside",
    "..\u2215outside",
    "x" * 300,
]


@pytest.fixture
def traps(tmp_path: Path, root: Path) -> dict[str, str]:
    """Create adapters outside of the root, and links to them."""
    outside = write(tmp_path / "outside")
    write(tmp_path / "rootevil")
    (root / "link-to-outside").symlink_to(outside)
    (root / "link-to-parent").symlink_to("..")
    (root / "chain").symlink_to("team/away")
    (root / "team" / "away").symlink_to("../../outside")
    (root / "link-to-link").symlink_to("link-to-parent")
    (tmp_path / "adapter").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    return {"root": str(root), "outside": str(outside)}


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_cannot_escape_root(source: LocalSource, traps: dict[str, str], name: str) -> None:
    name = name.format(**traps)
    with pytest.raises(AdapterNotFoundError) as missing:
        fetch(source, "missing")
    for ask in (source.authorize, source.find, lambda name, _: fetch(source, name)):
        with pytest.raises(AdapterNotFoundError) as caught:
            ask(name, None)
        # Paths outside of the roots are reported like missing paths.
        assert str(caught.value) == str(missing.value).replace("'missing'", repr(name))
    assert source.base_model_type(name, None) is None


@pytest.mark.parametrize("way", ["", "{root}/"])
@pytest.mark.parametrize(
    "name",
    ["link-to-outside", "link-to-nothing", "link-to-parent/outside", "link-to-parent/none", "link-to-link/x", "chain"],
)
def test_link_out_of_root_is_reported(
    source: LocalSource, traps: dict[str, str], root: Path, name: str, way: str
) -> None:
    (root / "link-to-nothing").symlink_to(root.parent / "none")
    with pytest.raises(AdapterError) as caught:
        source.find(way.format(**traps) + name, None)
    assert type(caught.value) is AdapterError
    assert str(caught.value).endswith(f"{name}': its folder is outside of its root, and such links are not allowed")


def test_link_out_of_root_does_not_hide_adapter_in_next_root(tmp_path: Path, root: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "team").symlink_to(tmp_path / "elsewhere")
    check_contents(fetch(LocalSource([tmp_path / "first", root]), "team/adapter"))


SPELLINGS = [
    "poet",
    "./poet",
    "poet/",
    "poet//",
    "poet/.",
    ".//./poet",
    "/srv/one/poet",
    "//srv/one//poet/",
    "/srv/./one/poet",
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_equivalent_paths_have_one_name(name: str) -> None:
    assert normalize_local_name(name, [Path("/srv/one"), Path("/srv/two")]) == "poet"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("team//poet/", "team/poet"),
        ("/srv/two/poet/", "/srv/two/poet"),  # `poet` may also exist in the first root
        ("/srv/one", "/srv/one"),
        ("/srv/one-more/poet", "/srv/one-more/poet"),
        ("/srv/one/~poet", "/srv/one/~poet"),
        (".", "."),
        ("./", "."),
        ("/", "/"),
        *(
            (name, name)
            for name in ("", "../poet", "./../poet", "poet/..", "/srv/one/../two", "~/./x", "a%2f./", "f://./x")
        ),
        ("./" * 300, "./" * 300),  # exceeds the name limit
    ],
)
def test_names_outside_roots_are_not_normalized(name: str, expected: str) -> None:
    assert normalize_local_name(name, [Path("/srv/one"), Path("/srv/two")]) == expected


def test_absolute_path_without_root_is_not_normalized() -> None:
    assert normalize_local_name("/srv//poet/", []) == "/srv/poet"
    assert normalize_local_name("/srv/poet", [Path("/")]) == "srv/poet"


def test_names_with_nul_are_not_found(source: LocalSource) -> None:
    for name in ("team/adapter\0", "\0", "team\0/adapter", "team/adapter\ud800"):
        with pytest.raises(AdapterNotFoundError):
            source.find(name, None)


def test_error_does_not_reveal_outside_paths(tmp_path: Path, source: LocalSource) -> None:
    (tmp_path / "there").mkdir()
    answers = set()
    for name in (str(tmp_path / "there"), str(tmp_path / "none")):
        with pytest.raises(AdapterNotFoundError) as caught:
            source.find(name, None)
        answers.add(str(caught.value).replace(name, ""))
    assert len(answers) == 1


ODD_FILES = ["link to a file outside", "link to nothing outside", "link to nothing", "loop", "fifo", "socket", "folder"]


def put_odd_file(path: Path, kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"secret": true}')
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            # Socket paths have a length limit.
            os.chdir(path.parent)
            server.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"link to a file outside": tmp_path / "secret", "link to nothing outside": tmp_path / "none"}
        path.symlink_to(targets.get(kind, path.name if kind == "loop" else "none"))


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, "tokenizer.json", *OTHER_FILES])
@pytest.mark.parametrize("kind", [*ODD_FILES, "device"])
def test_irregular_files_are_rejected(
    root: Path, source: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = root / "team" / "adapter" / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        put_odd_file(path, kind, tmp_path)
    with pytest.raises(AdapterError, match=f"'team/adapter': {path.name} is not a regular file below its root"):
        fetch(source, "team/adapter")


@pytest.mark.parametrize("target", ["outside", "nowhere", "a chain", "a device", "itself", "/"])
def test_template_folder_outside_root_is_rejected(root: Path, source: LocalSource, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "default.jinja").write_text("a secret")
    (root / "hop").symlink_to("../outside")
    targets: dict[str, str | Path]
    targets = {"outside": tmp_path / "outside", "a chain": "../../hop", "a device": "/dev/null", "itself": TEMPLATES}
    (root / "team" / "adapter" / TEMPLATES).symlink_to(targets.get(target, "/" if target == "/" else "none"))
    with pytest.raises(AdapterError, match=f"'team/adapter': {TEMPLATES} is not a folder below its root"):
        fetch(source, "team/adapter")


@pytest.mark.parametrize(
    ("looked_at", "swapped"),
    [(TEMPLATE, TEMPLATE), (TEMPLATE, TEMPLATES), (TEMPLATE, ""), (CONFIG, CONFIG), (CONFIG, ""), (TEMPLATES, "")],
)
def test_link_created_after_resolution_is_rejected(
    root: Path, source: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str, swapped: str
) -> None:
    """Replace a file or a parent folder by a link right after the source resolved the path."""
    folder, outside = root / "team" / "adapter", write(tmp_path / "outside", {**ADAPTER, TEMPLATE: b"a secret"})
    (outside / TEMPLATES / "named.jinja").write_text("as nobody may know")
    (folder / TEMPLATES).mkdir()
    (folder / TEMPLATE).write_text("plain")
    realpath = os.path.realpath

    def follow(path: Path) -> str:
        real = realpath(path)
        if path == folder / looked_at and not (tmp_path / "aside").exists():
            os.rename(folder / swapped, tmp_path / "aside")
            (folder / swapped).symlink_to(outside / swapped)
        return real

    monkeypatch.setattr(os.path, "realpath", follow)
    with pytest.raises(AdapterError, match=r"is not a regular file below its root|cannot be read") as caught:
        source.find("team/adapter", None)
    assert "named" not in str(caught.value)
    assert (tmp_path / "aside").exists()


def test_folder_without_permission_is_not_found(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deny access to the folder, as for a server that does not run as root."""
    for name in ("stat", "lstat"):
        real = getattr(os, name)

        def look(path: Path, real: Any = real, **options: Any) -> os.stat_result:
            if str(path).startswith(f"{root}/team/adapter/"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return cast(os.stat_result, real(path, **options))

        monkeypatch.setattr(os, name, look)
    with pytest.raises(AdapterError, match=f"^adapter 'team/adapter': has no {CONFIG} and no {WEIGHTS}"):
        fetch(source, "team/adapter")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOENT, errno.EACCES])
def test_unreadable_link_is_not_found(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A link may be removed concurrently, or be unreadable like some links in /proc."""
    (root / "latest").symlink_to("team/adapter")

    def refuse(path: str, **_: Any) -> str:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "readlink", refuse)
    with pytest.raises(AdapterError) as caught:
        source.find("latest", None)
    assert type(caught.value) is (AdapterNotFoundError if code == errno.EACCES else SourceError)
    assert str(root) not in str(caught.value)


def test_templates_are_listed_and_limited(root: Path, source: LocalSource) -> None:
    folder = root / "team" / "adapter" / TEMPLATES
    folder.mkdir()
    for name in (
        "b.jinja",
        "a.jinja",
        "no.txt",
        ".hidden.jinja",
        "ö.jinja",
        "a b.jinja",
        "-.jinja",
        f"{'x' * 101}.jinja",
    ):
        (folder / name).write_text("x")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "c.jinja").write_text("x")
    assert fetch(source, "team/adapter").tokenizer_files[-2:] == (f"{TEMPLATES}/a.jinja", f"{TEMPLATES}/b.jinja")
    for index in range(31):
        (folder / f"{index}.jinja").write_text("x")
    with pytest.raises(AdapterError, match="has more than 32 templates"):
        fetch(source, "team/adapter")
    for index in range(1000):
        (folder / f"{index}.txt").touch()
    with pytest.raises(AdapterError, match="has more than 1000 files"):
        fetch(source, "team/adapter")


def test_file_named_like_template_folder_is_ignored(root: Path, source: LocalSource) -> None:
    (root / "team" / "adapter" / TEMPLATES).write_text("x")
    check_contents(fetch(source, "team/adapter"))


def test_adapter_without_config_is_rejected(root: Path, source: LocalSource) -> None:
    (root / "team" / "adapter" / CONFIG).unlink()
    with pytest.raises(AdapterError, match=f"'team/adapter': has no {CONFIG}"):
        fetch(source, "team/adapter")


# --- base models


def test_base_model_type_is_read_from_config(root: Path, source: LocalSource) -> None:
    write(root / "base", {"config.json": b'{"model_type": "opt"}'})
    assert source.base_model_type("base", None) == "opt"
    assert source.base_model_type(str(root / "base"), None) == "opt"


def test_unknown_base_model_type_is_none(root: Path, source: LocalSource, tmp_path: Path) -> None:
    write(tmp_path / "base", {"config.json": b'{"model_type": "opt"}'})
    assert source.base_model_type(str(tmp_path / "base"), None) is None
    assert source.base_model_type("team/adapter", None) is None
    assert source.base_model_type("none", None) is None
    write(root / "odd", {"config.json": b"[]"})
    assert source.base_model_type("odd", None) is None
