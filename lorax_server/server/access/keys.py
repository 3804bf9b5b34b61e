"""API keys and their permissions: allowed adapters, rate limits, cache sharing and admin rights.

The server stores only SHA-256 digests, so secrets cannot appear in logs, errors or dumps. A keys file is TOML or JSON:

    [keys.alice]
    sha256 = "..."                   # hex digest; or `key` with the key itself
    adapters = ["poet", "s3:team-*"] # default: all
    base_model = false
    max_concurrent = 8
    requests_per_minute = 60
    tokens_per_minute = 10_000
    new_adapters_per_minute = 60
    weight = 2.0
    group = "team"                   # shares the prefix cache with this group; default: not shared
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

HUB_SOURCE = "hub"  # the only source that supports revisions (`name@revision`)
MAX_HEADER_CHARACTERS = 4096
MAX_SECRET_CHARACTERS = MAX_HEADER_CHARACTERS // 2
MAX_NAME_CHARACTERS = 64
MAX_SHOWN_NAME_CHARACTERS = 128  # client-supplied names are truncated to this length in error messages
BEARER_PATTERN = re.compile(r"bearer +([!-~]+) *", re.IGNORECASE)
SECRET_PATTERN = re.compile(r"[!-~]+")  # visible ASCII, as a header allows
HEX_DIGEST_PATTERN = re.compile(r"[0-9a-fA-F]{64}")

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
AdapterPattern = Annotated[str, msgspec.Meta(min_length=1)]


class Permissions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key's permissions and limits. The fields match the keys file."""

    adapters: tuple[AdapterPattern, ...] | None = None
    """Patterns of allowed adapters. None allows all."""
    base_model: bool = True
    max_concurrent: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    new_adapters_per_minute: PositiveInt | None = None
    """Rate limit for adapters that the server has not resolved before. None uses the server default."""
    weight: float = 1.0
    """Share of the engine relative to other keys under load."""
    group: str | None = None
    """Keys in the same group share the prefix cache. None shares with no other key."""
    is_admin: bool = msgspec.field(default=False, name="admin")


class Key(Permissions, frozen=True):
    """An authenticated caller. On a server without keys, every caller is `Key()`, which may use all adapters and the
    base model.
    """

    name: str = ""

    def may_use(self, source: str, name: str, default_source: str, has_revisions: bool | None = None) -> bool:
        """Return True if a pattern allows the adapter.

        Patterns refer to the default source unless they have a source prefix (`s3:team-*`). On the hub, a pattern
        without a revision allows all revisions; in other sources `poet@x` is a separate name. `has_revisions` overrides
        this for aliases of hub adapters. Names with `..` match no pattern, so `team/*` never allows files outside
        `team`.
        """
        if self.adapters is None:
            return True
        if has_revisions is None:
            has_revisions = source == HUB_SOURCE
        names = {name, name.partition("@")[0]} if has_revisions else {name}
        has_parent_reference = ".." in name.split("/")
        return not has_parent_reference and any(
            _matches(pattern, source, names, default_source) for pattern in self.adapters
        )

    def check_may_use(self, source: str, name: str, default_source: str, has_revisions: bool | None = None) -> None:
        if not self.may_use(source, name, default_source, has_revisions):
            label = f"adapter {name[:MAX_SHOWN_NAME_CHARACTERS]!r} from source {source[:32]!r}"
            raise ForbiddenError(f"this API key may not use {label}")

    def check_may_use_base(self) -> None:
        if not self.base_model:
            raise ForbiddenError("this API key may not use the base model; name an adapter")

    def cache_salt(self, salt: str) -> str:
        """Return the prefix cache salt. Only callers that may share cached prompts get the same salt.

        The salt is a JSON list, so that different combinations of name, group and client salt never produce the same
        salt. Callers without a key share the cache unless they send a salt.
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
    """Looks up keys by the digest of their secret."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        keys_file: Path | None = None,
    ) -> None:
        self._keys: dict[bytes, Key] = {}
        self._names: set[str] = set()
        self.allows_anonymous = not api_keys and keys_file is None
        self.has_admin = False
        for number, secret in enumerate(api_keys, 1):
            self._add_key(_digest_secret(secret, f"API key {number}"), Key(f"key-{number}"), f"API key {number}")
        if admin_key is not None:
            self._add_key(_digest_secret(admin_key, "the admin key"), Key("admin", is_admin=True), "the admin key")
        if keys_file is not None:
            for digest, key in _read_keys_file(keys_file):
                self._add_key(digest, key, f"{keys_file}: key {key.name!r}")

    @property
    def is_empty(self) -> bool:
        return not self._keys

    @property
    def weights(self) -> dict[str, float]:
        """A map from key name to scheduling weight."""
        return {key.name: key.weight for key in self._keys.values()}

    def identify(self, authorization: str | None) -> Key:
        """Return the key for an `Authorization` header.

        A server without keys accepts any header, because the token may be meant for the adapter source.
        """
        key = self._find_key(authorization)
        if key is not None:
            return key
        if self.allows_anonymous:
            return Key()
        if not authorization:
            raise AuthenticationError("an API key is required: send the header `Authorization: Bearer <key>`")
        raise AuthenticationError("unknown API key; the header must be `Authorization: Bearer <key>`")

    def check_admin(self, key: Key) -> None:
        if not self.has_admin:
            raise ForbiddenError(
                "this request requires an admin key; start the server with --admin-key, or on 127.0.0.1 without keys"
            )
        if not key.name:
            raise AuthenticationError("an admin key is required: send the header `Authorization: Bearer <key>`")
        if not key.is_admin:
            raise ForbiddenError("this API key is not an admin key")

    def _find_key(self, authorization: str | None) -> Key | None:
        """Return the key for a bearer token, looked up by digest. The cost does not depend on the number of keys.

        A constant-time comparison is not needed, because the lookup time can leak only digest bits. Clients cannot
        choose the digest of a guess, and a digest does not reveal the secret.
        """
        if authorization is None or len(authorization) > MAX_HEADER_CHARACTERS:
            return None
        bearer = BEARER_PATTERN.fullmatch(authorization)
        return None if bearer is None else self._keys.get(sha256(bearer[1].encode()).digest())

    def _add_key(self, digest: bytes, key: Key, location: str) -> None:
        if digest in self._keys:
            raise ConfigError(
                f"{location} has the same secret as key {self._keys[digest].name!r}; secrets must be unique"
            )
        if key.name in self._names:
            raise ConfigError(f"{location}: the name {key.name!r} is already used; choose another")
        self._keys[digest] = key
        self._names.add(key.name)
        self.has_admin |= key.is_admin


def _digest_secret(secret: str, location: str) -> bytes:
    if SECRET_PATTERN.fullmatch(secret) is None or len(secret) > MAX_SECRET_CHARACTERS:
        raise ConfigError(
            f"{location} must be 1 to {MAX_SECRET_CHARACTERS} visible ASCII characters without spaces, "
            "because it is sent in a header"
        )
    return sha256(secret.encode()).digest()


# --- Keys files -------------------------------------------------------------------------------------------------------


class _KeyEntry(Permissions, frozen=True, kw_only=True):
    """A table in the keys file. Never print it: `key` is a secret."""

    key: str | None = None
    sha256: str | None = None


def _read_keys_file(path: Path) -> list[tuple[bytes, Key]]:
    document = _parse_keys_file(path)
    unknown = sorted(document.keys() - {"keys"})
    if unknown:
        raise ConfigError(f"{path}: unknown field {unknown[0]!r}; keys are tables [keys.<name>]")
    tables = document.get("keys")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{path}: the file has no keys; add a table [keys.<name>]")
    keys = [_parse_key(f"{path}: key {name[:MAX_NAME_CHARACTERS]!r}", name, table) for name, table in tables.items()]
    if any(table.get("key") is not None for table in tables.values()) and path.stat().st_mode & stat.S_IROTH:
        logger.warning("%s contains secrets and is world-readable: chmod it to 600, or use sha256 instead of key", path)
    return keys


def _parse_keys_file(path: Path) -> dict[str, Any]:
    """Return the content of a keys file. Errors contain only a position, because parser messages may quote secrets."""
    parsers = {".toml": lambda content: tomllib.loads(content.decode()), ".json": parse_json}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: a keys file must end in .toml or .json")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the keys file: {error.strerror}") from None
    try:
        return parse(content)
    except (ValueError, RecursionError) as error:
        position = re.search(r"\(?(?:at )?line \d+,? column \d+", str(error))
        location = f" {position[0]}" if position else ""
        raise ConfigError(f"{path}: invalid {path.suffix[1:].upper()}{location}") from None


def _parse_key(location: str, name: str, table: object) -> tuple[bytes, Key]:
    try:
        entry = msgspec.convert(table, _KeyEntry)
    except msgspec.ValidationError as error:  # its message names types and fields, never values
        raise ConfigError(f"{location}: {error}") from None
    if not (math.isfinite(entry.weight) and entry.weight > 0):
        raise ConfigError(f"{location}: weight must be a finite number above 0")
    if not _is_valid_name(name):
        raise ConfigError(f"{location}: the name must have 1 to {MAX_NAME_CHARACTERS} printable characters")
    if entry.group is not None and not _is_valid_name(entry.group):
        raise ConfigError(f"{location}: group must have 1 to {MAX_NAME_CHARACTERS} printable characters")
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{location}: set either key or sha256")
    if entry.key is not None:
        digest = _digest_secret(entry.key, f"{location}: key")
    elif entry.sha256 is not None and HEX_DIGEST_PATTERN.fullmatch(entry.sha256):
        digest = bytes.fromhex(entry.sha256)
    else:
        raise ConfigError(f"{location}: sha256 must be 64 hexadecimal digits")
    return digest, Key(name, **{field: getattr(entry, field) for field in Permissions.__struct_fields__})


def _is_valid_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
