"""Compute the adapter identity: a hash of its tensors and settings."""

import hashlib
import json
from collections.abc import Mapping, Sequence
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

NamedTensor = tuple[str, TensorInfo]


def identify(config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None = None) -> str:
    """Return a hash of the adapter's tensors and settings. Tensor order in the file does not matter.

    If `stamp` is given, raise SourceError if the file changed after that stamp was read.
    """
    label = f"adapter {config.name!r}"
    groups = _split_evenly(sorted(tensors.items(), key=lambda item: item[1].start))
    hash_group = partial(_hash_tensors, label, path, stamp)
    with convert_read_errors(label, path):
        if len(groups) == 1:
            results = [hash_group(groups[0])]
        else:
            with ThreadPoolExecutor(len(groups), "hash adapters") as threads:
                results = list(threads.map(hash_group, groups))
    digests = {key: digest for group in results for key, digest in group.items()}
    digest = hashlib.sha256(_encode_line(["lorax adapter", 3, config.identity_settings()]))
    for key in sorted(digests):
        digest.update(digests[key])
    return digest.hexdigest()


def _split_evenly(tensors: Sequence[NamedTensor]) -> list[list[NamedTensor]]:
    """Split tensors, in file order, into groups of about equal size, one group per thread."""
    total = sum(info.stop - info.start for _, info in tensors)
    size = max(MIN_THREAD_BYTES, -(-total // NUM_HASH_THREADS))
    groups: list[list[NamedTensor]] = [[]]
    num_bytes = 0
    for key, info in tensors:
        if num_bytes >= size * len(groups):
            groups.append([])
        groups[-1].append((key, info))
        num_bytes += info.stop - info.start
    return groups


def _hash_tensors(label: str, path: Path, stamp: Stamp | None, tensors: Sequence[NamedTensor]) -> dict[str, bytes]:
    """Return each tensor's hash, which covers name, dtype, shape and data."""
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
