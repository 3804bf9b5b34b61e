"""API keys, the adapters that each may use, and how much it may ask for.

The server keeps digests of secrets only, so that none can turn up in a log, an error or a dump. A keys file is TOML or
JSON:

    [keys.alice]
    sha256 = "..."                   # of the key, in hex; or `key`, the key itself
    adapters = ["poet", "s3:team-*"] # absent: all
    base_model = false
    max_concurrent = 8
    requests_per_minute = 60
    tokens_per_minute = 10_000
    new_adapters_per_minute = 60
    weight = 2.0
    group = "team"                   # shares cached prompts with other keys of this group; absent: with none
    admin = false
"""

import logging
import math
import re
import stat
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lorax_server.errors import AuthenticationError, ConfigError, ForbiddenError
from lorax_server.files.strict_json import parse_json

logger = logging.getLogger(__name__)

HUB = "hub"  # the source whose names may end in a revision
MAX_HEADER_CHARACTERS = 4096
MAX_SECRET_CHARACTERS = MAX_HEADER_CHARACTERS // 2
MAX_NAME_CHARACTERS = 64
SHOWN_CHARACTERS = 128  # of a name that a client sent
BEARER = re.compile(r"bearer +([!-~]+) *", re.IGNORECASE)
SECRET = re.compile(r"[!-~]+")  # what a header can carry, without spaces
HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Pattern = Annotated[str, msgspec.Meta(min_length=1)]


class Permissions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters and rates that a key may use. The fields are those of a keys file."""

    adapters: tuple[Pattern, ...] | None = None
    """Patterns of adapters that it may use. None: all."""
    base_model: bool = True
    max_concurrent: AtLeastOne | None = None
    requests_per_minute: AtLeastOne | None = None
    tokens_per_minute: AtLeastOne | None = None
    new_adapters_per_minute: AtLeastOne | None = None
    """Adapters that it may name and that the server has not found before. None: the server's number."""
    weight: float = 1.0
    """Its share, compared to other keys, of an engine that has too much to do."""
    group: str | None = None
    """The keys of a group share cached prompts. None: this key shares with no other."""
    is_admin: bool = msgspec.field(default=False, name="admin")


class Key(Permissions, frozen=True):
    """A caller. On a server without keys each caller is `Key()`, which may use anything."""

    name: str = ""

    def may_use(self, source: str, name: str, default_source: str, has_revisions: bool | None = None) -> bool:
        """Tell whether a pattern allows an adapter. A pattern is of the default source unless it begins with another
        one, as in `s3:team-*`.

        A pattern without a revision allows every revision. Only the hub has revisions: elsewhere `poet@x` is another
        folder than `poet`. Where an operator's name stands for an adapter of another source, `has_revisions` tells. A
        name that climbs out of its folder matches no pattern: what `team/*` allows must be in `team`.
        """
        if self.adapters is None:
            return True
        if has_revisions is None:
            has_revisions = source == HUB
        names = {name, name.partition("@")[0]} if has_revisions else {name}
        climbs = ".." in name.split("/")
        return not climbs and any(_matches(pattern, source, names, default_source) for pattern in self.adapters)

    def check_may_use(self, source: str, name: str, default_source: str, has_revisions: bool | None = None) -> None:
        if not self.may_use(source, name, default_source, has_revisions):
            shown = f"adapter {name[:SHOWN_CHARACTERS]!r} of source {source[:32]!r}"
            raise ForbiddenError(f"this API key may not use {shown}")

    def check_may_use_base(self) -> None:
        if not self.base_model:
            raise ForbiddenError("this API key may not use the base model; name an adapter")

    def salt(self, salt: str) -> str:
        """Return a salt for the engine's cache. Only callers that may share cached prompts get the same one.

        It is a JSON list, so that no name, group or salt of a client can be written to look like another combination.
        Callers without a key share unless they send a salt of their own.
        """
        if not self.name:
            return msgspec.json.encode([salt]).decode() if salt else ""
        owner = ("group", self.group) if self.group else ("key", self.name)
        return msgspec.json.encode([*owner, salt]).decode()


def _matches(pattern: str, source: str, names: set[str], default_source: str) -> bool:
    pattern_source, colon, name_pattern = pattern.partition(":")
    if not colon:
        pattern_source, name_pattern = default_source, pattern
    return source == pattern_source and any(fnmatchcase(name, name_pattern) for name in names)


class KeyRing:
    """All keys, by the digests of their secrets."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        keys_file: Path | None = None,
    ) -> None:
        self._keys: dict[bytes, Key] = {}
        self._names: set[str] = set()
        self.is_open = not api_keys and keys_file is None  # to callers without a key; also an empty file closes it
        self.has_admin = False
        for number, secret in enumerate(api_keys, 1):
            self._add(_digest_of(secret, f"API key {number}"), Key(f"key-{number}"), f"API key {number}")
        if admin_key is not None:
            self._add(_digest_of(admin_key, "the admin key"), Key("admin", is_admin=True), "the admin key")
        if keys_file is not None:
            for digest, key in _read_keys(keys_file):
                self._add(digest, key, f"{keys_file}: key {key.name!r}")

    @property
    def weights(self) -> dict[str, float]:
        """The shares of keys, by their names."""
        return {key.name: key.weight for key in self._keys.values()}

    def identify(self, authorization: str | None) -> Key:
        """Find the key of an `Authorization` header. An open server takes any: it may be meant for a source."""
        key = self._find(authorization)
        if key is not None:
            return key
        if self.is_open:
            return Key()
        if not authorization:
            raise AuthenticationError("an API key is needed: send the header `Authorization: Bearer <key>`")
        raise AuthenticationError("this API key is not known; the header looks like `Authorization: Bearer <key>`")

    def check_admin(self, key: Key) -> None:
        if not self.has_admin:
            raise ForbiddenError("nobody may do this: there is no admin key; start the server with --admin-key")
        if not key.name:
            raise AuthenticationError("an admin's key is needed: send the header `Authorization: Bearer <key>`")
        if not key.is_admin:
            raise ForbiddenError("this API key is not an admin's")

    def _find(self, authorization: str | None) -> Key | None:
        """Look a key up by the digest of what was sent, which costs the same for one key and for ten thousand.

        Comparing in constant time would protect nothing. The time of a lookup may tell something about digests that
        begin alike, but a client cannot choose the digest of a guess, and none of its bits lead back to a secret.
        """
        if authorization is None or len(authorization) > MAX_HEADER_CHARACTERS:
            return None
        bearer = BEARER.fullmatch(authorization)
        return None if bearer is None else self._keys.get(sha256(bearer[1].encode()).digest())

    def _add(self, digest: bytes, key: Key, where: str) -> None:
        if digest in self._keys:
            raise ConfigError(
                f"{where} is the same as that of {self._keys[digest].name!r}; every key has to be its own"
            )
        if key.name in self._names:
            raise ConfigError(f"{where}: the name {key.name!r} is taken; use another")
        self._keys[digest] = key
        self._names.add(key.name)
        self.has_admin |= key.is_admin


def _digest_of(secret: str, where: str) -> bytes:
    if SECRET.fullmatch(secret) is None or len(secret) > MAX_SECRET_CHARACTERS:
        raise ConfigError(
            f"{where} must be 1 to {MAX_SECRET_CHARACTERS} visible ASCII characters without spaces, "
            "since a header cannot carry another"
        )
    return sha256(secret.encode()).digest()


# --- Files of keys ----------------------------------------------------------------------------------------------------


class _KeyEntry(Permissions, frozen=True, kw_only=True):
    """A table of the file. It is never printed, since `key` is a secret."""

    key: str | None = None
    sha256: str | None = None


def _read_keys(path: Path) -> list[tuple[bytes, Key]]:
    document = _parse(path)
    unknown = sorted(document.keys() - {"keys"})
    if unknown:
        raise ConfigError(f"{path}: field {unknown[0]!r} is not known; keys are tables [keys.<name>]")
    tables = document.get("keys")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{path}: there are no keys in it; add a table [keys.<name>]")
    keys = [_read_key(f"{path}: key {name[:MAX_NAME_CHARACTERS]!r}", name, table) for name, table in tables.items()]
    if any(table.get("key") is not None for table in tables.values()) and path.stat().st_mode & stat.S_IROTH:
        logger.warning("%s holds keys that everybody on this machine can read: chmod 600, or give their sha256", path)
    return keys


def _parse(path: Path) -> dict[str, Any]:
    """Parse a keys file. A parser's message may quote the file, so that only the position in it is told."""
    parsers = {".toml": lambda content: tomllib.loads(content.decode()), ".json": parse_json}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: a file of keys ends in .toml or .json")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the file of keys cannot be read: {error.strerror}") from None
    try:
        return parse(content)
    except (ValueError, RecursionError) as error:
        position = re.search(r"\(?(?:at )?line \d+,? column \d+", str(error))
        where = f" {position[0]}" if position else ""
        raise ConfigError(f"{path}: this is not {path.suffix[1:].upper()}{where}") from None


def _read_key(where: str, name: str, table: object) -> tuple[bytes, Key]:
    try:
        entry = msgspec.convert(table, _KeyEntry)
    except msgspec.ValidationError as error:  # it names types and fields, never values
        raise ConfigError(f"{where}: {error}") from None
    if not (math.isfinite(entry.weight) and entry.weight > 0):
        raise ConfigError(f"{where}: weight must be a number above 0")
    if not _is_name(name):
        raise ConfigError(f"{where}: a name has 1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    if entry.group is not None and not _is_name(entry.group):
        raise ConfigError(f"{where}: group has 1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where}: give either key or sha256")
    if entry.key is not None:
        digest = _digest_of(entry.key, f"{where}: key")
    elif entry.sha256 is not None and HEX_DIGEST.fullmatch(entry.sha256):
        digest = bytes.fromhex(entry.sha256)
    else:
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits")
    return digest, Key(name, **{field: getattr(entry, field) for field in Permissions.__struct_fields__})


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
