"""Files that save the next start some seconds: each holds what one name, made of all that it depends on, stands for."""

import hashlib
import logging
import os
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "LORAX_CACHE"
DIGEST = hashlib.sha256().digest_size


def kept_folder(name: str) -> Path:
    """Return the folder of one kind of such files: in `LORAX_CACHE`, or with other caches of the user."""
    given = os.environ.get(VARIABLE)
    try:
        root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lorax"
    except RuntimeError:  # a user without a home
        root = Path(os.devnull)  # where nothing is, and nothing can be written
    return root / name


def make_name(*parts: str | bytes) -> str:
    """Return a name that other parts do not have."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def read_kept(path: Path) -> bytes | None:
    """Read a file; None if there is none, or only a damaged one."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:DIGEST], stored[DIGEST:]
    return content if hashlib.sha256(content).digest() == digest else None


def keep(path: Path, content: bytes) -> None:
    """Write a file atomically. If the folder cannot be written, the next start takes longer."""
    part = path.with_name(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be kept for the next start: %s", path.parent, error)
