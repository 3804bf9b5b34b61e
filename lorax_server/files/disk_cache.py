"""A disk cache that speeds up the next server start. Keys are hashes of all inputs."""

import hashlib
import logging
import os
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LORAX_CACHE"
DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder(name: str) -> Path:
    """Return the cache folder `name` in `LORAX_CACHE` or in the user's cache directory."""
    configured_folder = os.environ.get(CACHE_VARIABLE)
    try:
        root = (
            Path(configured_folder)
            if configured_folder
            else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lorax"
        )
    except RuntimeError:  # the user has no home directory
        root = Path(os.devnull)  # so that reads and writes fail
    return root / name


def make_key(*parts: str | bytes) -> str:
    """Return a cache key, which is a hash of the strings and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def load(path: Path) -> bytes | None:
    """Return the cached content, or None if the file is missing or damaged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def store(path: Path, content: bytes) -> None:
    """Write content to the cache atomically. Log a warning if the folder is not writable."""
    part = path.with_name(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot write to the cache %s: %s", path.parent, error)
