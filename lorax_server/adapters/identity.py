"""Who an adapter is: a hash of its content. A name only points at one."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.adapters.config import AdapterConfig
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.plain_file import ChangedError, Stamp, open_plain

CHUNK_BYTES = 1 << 20


def identify(config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None = None) -> str:
    """Equal for equal tensors under equal settings, however the file orders them. Reads the file in small pieces.
    `stamp` is that of the file that is meant, if only that one will do."""
    try:
        return _digest(config, path, tensors, stamp)
    except ChangedError as error:
        raise SourceError(f"adapter {config.name!r}: {path.name} changed while it was read; try again") from error
    except OSError as error:
        raise AdapterError(f"adapter {config.name!r}: {path.name} cannot be read: {error.strerror}") from error


def _digest(config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None) -> str:
    digest = hashlib.sha256(_line(["lorax adapter", 1, config.identity()]))
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open_plain(path, stamp) as file:
        for key, info in sorted(tensors.items()):
            digest.update(_line([key, info.dtype, info.shape]))
            file.seek(info.start)
            left = info.stop - info.start
            while left:
                count = file.readinto(chunk[: min(left, CHUNK_BYTES)])
                if not count:
                    raise AdapterError(f"adapter {config.name!r}: {path.name} became shorter while it was read")
                digest.update(chunk[:count])
                left -= count
    return digest.hexdigest()


def _line(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
