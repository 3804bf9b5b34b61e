"""Computes the adapter identity, which is a hash of the adapter's tensors and settings."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.adapters.config import AdapterConfig
from lorax_server.errors import AdapterError
from lorax_server.files.regular_file import Stamp, convert_read_errors, open_regular_file

CHUNK_BYTES = 1 << 20
NUM_HASH_THREADS = 4
MIN_THREAD_BYTES = 1 << 23  # smaller files are hashed by fewer threads


def compute_identity(
    config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None = None
) -> str:
    """Return a hash of the adapter's tensors and settings. The order of the tensors in the file does not affect the
    hash.

    If `stamp` is set, raise SourceError if the file has changed since the stamp was read.
    """
    label = f"adapter {config.name!r}"
    items, num_bytes = list(tensors.items()), sum(info.stop - info.start for info in tensors.values())
    count = min(NUM_HASH_THREADS, 1 + num_bytes // MIN_THREAD_BYTES)
    groups = [items[first::count] for first in range(count)]
    with convert_read_errors(label, path), ThreadPoolExecutor(count, "hash adapters") as threads:
        results = list(threads.map(partial(_hash_tensors, label, path, stamp), groups))
    digests = {key: digest for group in results for key, digest in group.items()}
    digest = hashlib.sha256(_encode_line(["lorax adapter", 3, config.identity_settings()]))
    for key in sorted(digests):
        digest.update(digests[key])
    return digest.hexdigest()


def _hash_tensors(
    label: str, path: Path, stamp: Stamp | None, tensors: Iterable[tuple[str, TensorInfo]]
) -> dict[str, bytes]:
    """Return a hash of each tensor's name, dtype, shape and data."""
    digests = {}
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open_regular_file(path, stamp) as file:
        for key, info in tensors:
            digest = hashlib.sha256(_encode_line([key, info.dtype, info.shape]))
            file.seek(info.start)
            bytes_left = info.stop - info.start
            while bytes_left:
                count = file.readinto(chunk[: min(bytes_left, CHUNK_BYTES)])
                if not count:
                    raise AdapterError(f"{label}: {path.name} was truncated while it was read")
                digest.update(chunk[:count])
                bytes_left -= count
            digests[key] = digest.digest()
    return digests


def _encode_line(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
