import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorax_server.errors import AuthenticationError, ConfigError, ForbiddenError
from lorax_server.server.access.keys import MAX_HEADER_CHARACTERS, Key, KeyRing

SECRET = "sk-tops3cret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def write(folder: Path, text: str, name: str = "keys.toml") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return path


# --- Permissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "source", "name", "is_allowed"),
    [
        (None, "s3", "anything", True),
        ((), "hub", "poet", False),
        (("poet",), "hub", "poet", True),
        (("poet",), "hub", "poet2", False),
        (("poet",), "hub", "Poet", False),
        (("poet",), "local", "poet", False),
        (("*",), "hub", "owner/name", True),
        (("*",), "s3", "owner/name", False),
        (("s3:team-*",), "s3", "team-a", True),
        (("s3:team-*",), "s3", "other", False),
        (("s3:team-*",), "hub", "team-a", False),
        (("s3:team-*",), "hub", "s3:team-a", False),
        (("hub:poet",), "hub", "poet", True),
        (("poet",), "hub", "poet@v2", True),
        (("poet@v2",), "hub", "poet@v2", True),
        (("poet@v2",), "hub", "poet@v3", False),
        (("poet@v2",), "hub", "poet", False),
        (("a", "b"), "hub", "b", True),
        (("team/*",), "hub", "team/a/b", True),
        (("team/*",), "hub", "team/../secret", False),
        (("team/a",), "hub", "team/a@/../../secret", False),
        (("*",), "hub", "..", False),
        (("team-[ab]",), "hub", "team-b", True),
        (("team-[ab]",), "hub", "team-c", False),
        (("local:poet",), "local", "poet@x", False),  # a different folder
        (("s3:poet",), "s3", "poet@x", False),
        (("s3:poet@x",), "s3", "poet@x", True),
        (("s3:poet@*",), "s3", "poet@x", True),
    ],
)
def test_patterns_allow_matching_adapters(patterns: Any, source: str, name: str, is_allowed: bool) -> None:
    key = Key("k", adapters=patterns)
    if is_allowed:
        key.check_may_use(source, name, "hub")
    else:
        with pytest.raises(ForbiddenError, match="may not use adapter"):
            key.check_may_use(source, name, "hub")


def test_pattern_without_source_uses_default_source() -> None:
    Key("k", adapters=("poet",)).check_may_use("local", "poet", "local")


@pytest.mark.parametrize(("place", "is_allowed"), [("hub", True), ("local", False), ("s3", False)])
def test_alias_revisions_are_allowed_on_hub_only(place: str, is_allowed: bool) -> None:
    """The key may use the name `poet`; test both default sources."""
    for default in ("hub", "local"):
        assert Key("k", adapters=("poet",)).may_use(default, "poet@x", default, place == "hub") is is_allowed


def test_long_name_is_truncated_in_error() -> None:
    with pytest.raises(ForbiddenError) as caught:
        Key("k", adapters=("*a*b*c*d*e*",)).check_may_use("hub", "abcd" * 100_000, "hub")
    assert len(str(caught.value)) < 300


def test_key_can_forbid_base_model() -> None:
    Key("k").check_may_use_base()
    with pytest.raises(ForbiddenError, match="base model"):
        Key("k", base_model=False).check_may_use_base()


# --- Authentication ---------------------------------------------------------------------------------------------------


def test_server_without_keys_allows_anonymous_callers() -> None:
    ring = KeyRing()
    assert ring.allows_anonymous
    for header in (None, "", "Bearer hf_token", "Basic abc", "\xff\ud800", "x" * 10**6):
        assert ring.identify(header) == Key()


def test_admin_key_alone_still_allows_anonymous_callers() -> None:
    ring = KeyRing(admin_key="boss")
    assert ring.allows_anonymous
    assert ring.identify("Bearer else") == Key()
    assert ring.identify("Bearer boss").is_admin


@pytest.mark.parametrize("header", ["Bearer two", "bearer two", "BEARER two", "Bearer   two", "Bearer two "])
def test_known_key_is_identified(header: str) -> None:
    assert KeyRing(["one", "two"]).identify(header).name == "key-2"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "two",
        "Bearer",
        "Bearer ",
        "Bearertwo",
        "Basic two",
        "Bearer tw",
        "Bearer twoo",
        "Bearer two x",
        "Bearer two\n",
        "Bearer two\x00",
        "Bearer tw\xf6",
        "Bearer \ud800",
        "Bearer " + " " * MAX_HEADER_CHARACTERS + "two",
        "Bearer " + "x" * 10**7,
    ],
)
def test_invalid_authorization_header_is_rejected(header: str | None) -> None:
    with pytest.raises(AuthenticationError, match="Authorization: Bearer") as caught:
        KeyRing(["one", "two"]).identify(header)
    assert len(str(caught.value)) < 200


class Digests(dict[bytes, Key]):
    """A dictionary that counts its lookups and cannot be iterated."""

    num_asked = 0

    def get(self, digest: bytes, default: Any = None) -> Any:
        self.num_asked += 1
        return super().get(digest, default)

    def __iter__(self) -> Any:
        raise AssertionError("a request went through all keys")

    items = values = keys = __iter__


def test_key_lookup_does_not_iterate_over_keys() -> None:
    ring = KeyRing([f"secret-{number}" for number in range(10_000)], "boss")
    digests = Digests()
    dict.update(digests, ring._keys)
    ring._keys = digests
    assert ring.identify("Bearer secret-7777").name == "key-7778"
    ring.check_admin(ring.identify("Bearer boss"))
    with pytest.raises(AuthenticationError):
        ring.identify("Bearer secret-10000")
    assert digests.num_asked == 3


# --- Prefix cache sharing ---------------------------------------------------------------------------------------------


def test_cache_salt_depends_on_key_or_group() -> None:
    one, other = Key("one"), Key("other")
    in_team, also_in_team = Key("a", group="team"), Key("b", group="team")
    assert one.cache_salt("") == one.cache_salt("") != other.cache_salt("")
    assert in_team.cache_salt("") == also_in_team.cache_salt("") != one.cache_salt("")
    assert in_team.cache_salt("mine") == also_in_team.cache_salt("mine") != in_team.cache_salt("")
    assert Key().cache_salt("") == "", "without keys all share, as ever"
    assert Key().cache_salt("mine") == Key().cache_salt("mine") != ""


def test_cache_salts_never_collide() -> None:
    """Test names, groups and salts that imitate other combinations."""
    words = ["a", "key", "group", 'a","b', '"', "\\", ",", '["key","a",""]', '["group","a",""]', "\u0000", "é"]
    keys = [Key(), *(Key(word) for word in words), *(Key("k", group=word) for word in words)]
    result = [key.cache_salt(salt) for key in keys for salt in ("", *words, *(each.cache_salt("") for each in keys))]
    asked = {(key.group or key.name, bool(key.group), salt) for key in keys for salt in ("", *words)} | {
        (key.group or key.name, bool(key.group), each.cache_salt("")) for key in keys for each in keys
    }
    assert len(set(result)) == len(asked)


def test_keys_file_sets_groups(tmp_path: Path) -> None:
    path = write(tmp_path, '[keys.a]\nkey = "one"\ngroup = "team"\n[keys.b]\nkey = "two"\ngroup = "team"')
    ring = KeyRing(keys_file=path)
    assert ring.identify("Bearer one").group == ring.identify("Bearer two").group == "team"


def test_check_admin_accepts_admin_keys_only() -> None:
    ring = KeyRing(["user"], "boss")
    ring.check_admin(ring.identify("Bearer boss"))
    assert ring.identify("Bearer boss").is_admin
    assert not ring.identify("Bearer user").is_admin
    with pytest.raises(ForbiddenError, match="not an admin"):
        ring.check_admin(ring.identify("Bearer user"))
    for header in (None, "Bearer other"):
        with pytest.raises(AuthenticationError):
            ring.check_admin(ring.identify(header))


def test_check_admin_fails_without_admin_key() -> None:
    for ring, headers in ((KeyRing(), (None, "Bearer user", "Bearer x")), (KeyRing(["user"]), ("Bearer user",))):
        for header in headers:
            with pytest.raises(ForbiddenError, match="--admin-key"):
                ring.check_admin(ring.identify(header))


def test_anonymous_caller_is_never_admin() -> None:
    ring = KeyRing(admin_key="boss")
    with pytest.raises(AuthenticationError):
        ring.check_admin(ring.identify("Bearer x"))


@pytest.mark.parametrize("secret", ["", " ", "a b", "a\n", "schlüssel", "\ud800", "x" * 10_000])
def test_secrets_invalid_in_headers_are_rejected(secret: str) -> None:
    makers: list[Callable[[], KeyRing]] = [lambda: KeyRing([secret]), lambda: KeyRing(admin_key=secret)]
    for make in makers:
        with pytest.raises(ConfigError, match="ASCII") as caught:
            make()
        assert len(str(caught.value)) < 200


def test_duplicate_secrets_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"API key 2 .* 'key-1'") as caught:
        KeyRing([SECRET, SECRET])
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="admin key"):
        KeyRing([SECRET], SECRET)


# --- Files ------------------------------------------------------------------------------------------------------------

FULL = f"""
[keys.alice]
key = "{SECRET}"
adapters = ["poet", "s3:team-*"]
base_model = false
max_concurrent = 8
requests_per_minute = 60
tokens_per_minute = 10_000
weight = 2

[keys.bob]
sha256 = "{hashlib.sha256(b"bobs").hexdigest().upper()}"
admin = true
"""
ALICE = Key(
    "alice",
    adapters=("poet", "s3:team-*"),
    base_model=False,
    max_concurrent=8,
    requests_per_minute=60,
    tokens_per_minute=10_000,
    weight=2.0,
)


def test_keys_file_sets_permissions(tmp_path: Path) -> None:
    ring = KeyRing(["plain"], "boss", write(tmp_path, FULL))
    assert not ring.allows_anonymous
    assert ring.identify(f"Bearer {SECRET}") == ALICE
    ring.check_admin(bob := ring.identify("Bearer bobs"))
    assert bob == Key("bob", is_admin=True)
    assert ring.identify("Bearer plain").name == "key-1"
    assert ring.weights == {"key-1": 1.0, "admin": 1.0, "alice": 2.0, "bob": 1.0}


def test_keys_file_can_be_json(tmp_path: Path) -> None:
    table = {"key": SECRET, "adapters": ["poet", "s3:team-*"], "base_model": False, "max_concurrent": 8}
    table |= {"requests_per_minute": 60, "tokens_per_minute": 10_000, "weight": 2}
    path = write(tmp_path, json.dumps({"keys": {"alice": table}}), "keys.JSON")
    assert KeyRing(keys_file=path).identify(f"Bearer {SECRET}") == ALICE


def test_keys_file_with_admins_only_requires_keys(tmp_path: Path) -> None:
    ring = KeyRing(keys_file=write(tmp_path, f'[keys.a]\nkey = "{SECRET}"\nadmin = true'))
    assert not ring.allows_anonymous
    with pytest.raises(AuthenticationError):
        ring.identify(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no keys"),
        ("[keys]", "no keys"),
        ("keys = 3", "no keys"),
        (f"[key.a]\nkey = '{SECRET}'", "unknown field 'key'"),
        ("[keys.a]", "'a': set either key or sha256"),
        (f"[keys.a]\nkey = '{SECRET}'\nsha256 = '{DIGEST}'", "'a': set either"),
        (f"[keys]\na = '{SECRET}'", "'a': Expected `object`"),
        (f"[keys.a]\nkey = '{SECRET}'\nadapter = ['x']", "'a': .*`adapter`"),
        (f"[keys.a]\nkey = ['{SECRET}']", r"'a': .*\$\.key"),
        ("[keys.a]\nkey = 12345", r"'a': .*\$\.key"),
        ("[keys.a]\nkey = ''", "'a': key must be"),
        ("[keys.a]\nkey = 'sk tops3cret'", "'a': key must be"),
        (f"[keys.a]\nsha256 = '{SECRET}'", "'a': sha256"),
        ("[keys.a]\nsha256 = ''", "'a': sha256"),
        (f"[keys.a]\nkey = '{SECRET}'\nadapters = '*'", r"'a': .*\$\.adapters"),
        (f"[keys.a]\nkey = '{SECRET}'\nadapters = ['']", r"'a': .*\$\.adapters"),
        (f"[keys.a]\nkey = '{SECRET}'\nbase_model = 1", r"'a': .*\$\.base_model"),
        (f"[keys.a]\nkey = '{SECRET}'\nadmin = 'yes'", r"'a': .*\$\.admin"),
        (f"[keys.a]\nkey = '{SECRET}'\nmax_concurrent = 0", r"'a': .*\$\.max_concurrent"),
        (f"[keys.a]\nkey = '{SECRET}'\nmax_concurrent = true", r"'a': .*\$\.max_concurrent"),
        (f"[keys.a]\nkey = '{SECRET}'\nrequests_per_minute = 1.5", r"'a': .*\$\.requests_per_minute"),
        (f"[keys.a]\nkey = '{SECRET}'\ntokens_per_minute = -1", r"'a': .*\$\.tokens_per_minute"),
        (f"[keys.a]\nkey = '{SECRET}'\ngroup = ''", "'a': group must have"),
        (f"[keys.a]\nkey = '{SECRET}'\ngroup = 'a\x07'", "invalid TOML"),
        (f'[keys.a]\nkey = "{SECRET}"\ngroup = "a\\u0007"', "'a': group must have"),
        (f"[keys.a]\nkey = '{SECRET}'\ngroup = ['team']", r"'a': .*\$\.group"),
        (f"[keys.a]\nkey = '{SECRET}'\nweight = 0", "'a': weight"),
        (f"[keys.a]\nkey = '{SECRET}'\nweight = nan", "'a': weight"),
        (f"[keys.a]\nkey = '{SECRET}'\nweight = inf", "'a': weight"),
        (f"[keys.a]\nkey = '{SECRET}'\n[keys.b]\nsha256 = '{DIGEST}'", "'b' has the same secret as key 'a'"),
        (f"[keys.a]\nkey = '{SECRET}'\n[keys.a]\nkey = 'b'", "invalid TOML"),
        (f"[keys.a]\nkey = {SECRET}", "invalid TOML.*line 2"),
        (f"[keys.admin]\nkey = '{SECRET}'", "'admin' is already used"),
        (f"[keys.key-1]\nkey = '{SECRET}'", "'key-1' is already used"),
        (f"[keys.'']\nkey = '{SECRET}'", "the name must have"),
        (f'[keys."a\\nb"]\nkey = "{SECRET}"', "the name must have"),
        (f"[keys.{'a' * 65}]\nkey = '{SECRET}'", "the name must have"),
    ],
)
def test_invalid_keys_file_error_contains_no_secrets(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        KeyRing(["plain"], "boss", path)
    assert str(path) in str(caught.value)
    assert "tops3cret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"keys": {"a": {"key": "x"}, "a": {"key": "y"}}}', b"\xff\xfe", b"[" * 100_000, b'{"keys": NaN}'],
)
def test_invalid_json_keys_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="invalid JSON"):
        KeyRing(keys_file=path)


def test_unreadable_keys_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\x00")
    for name, message in (
        ("absent.toml", "No such file"),
        ("folder.toml", "directory"),
        ("binary.toml", "invalid TOML"),
        ("keys.yaml", "must end in .toml or .json"),
    ):
        with pytest.raises(ConfigError, match=message):
            KeyRing(keys_file=tmp_path / name)


def test_world_readable_plain_keys_cause_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, hashed = write(tmp_path, FULL), write(tmp_path, f"[keys.a]\nsha256 = '{DIGEST}'", "b.toml")
    with caplog.at_level(logging.WARNING):
        KeyRing(keys_file=plain)
        hashed.chmod(0o644)
        KeyRing(keys_file=hashed)
        assert caplog.text == ""
        plain.chmod(0o644)
        KeyRing(keys_file=plain)
    assert "chmod it to 600" in caplog.text
    assert SECRET not in caplog.text


def test_key_ring_stores_no_secrets(tmp_path: Path) -> None:
    ring = KeyRing(["plain-s3cret"], "boss-s3cret", write(tmp_path, FULL))
    everything = repr(ring) + str(ring) + repr(vars(ring)) + repr(ring.identify(f"Bearer {SECRET}"))
    assert "s3cret" not in everything
