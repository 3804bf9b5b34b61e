"""The identity of an adapter: a hash of its content. A name only points at one."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.adapters.config import AdapterConfig
from lorax_server.errors import AdapterError
from lorax_server.files.plain_file import Stamp, open_plain, reading

CHUNK_BYTES = 1 << 20


def identify(config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None = None) -> str:
    """Hash the tensors and the settings of an adapter, however the file orders them. Reads the file in small pieces.

    With a `stamp`, only the file that has it is read.
    """
    what = f"adapter {config.name!r}"
    digest = hashlib.sha256(_line(["lorax adapter", 1, config.identity_settings()]))
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with reading(what, path), open_plain(path, stamp) as file:
        for key, info in sorted(tensors.items()):
            digest.update(_line([key, info.dtype, info.shape]))
            file.seek(info.start)
            bytes_left = info.stop - info.start
            while bytes_left:
                count = file.readinto(chunk[: min(bytes_left, CHUNK_BYTES)])
                if not count:
                    raise AdapterError(f"{what}: {path.name} became shorter while it was read")
                digest.update(chunk[:count])
                bytes_left -= count
    return digest.hexdigest()


def _line(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
