"""The identity of an adapter: a hash of its content. A name only points at one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.adapters.config import AdapterConfig
from lorax_server.errors import AdapterError
from lorax_server.files.plain_file import Stamp, open_plain, reading

CHUNK_BYTES = 1 << 20
NUM_THREADS, THREAD_BYTES = 4, 1 << 23  # more threads than one only if each has so much to do

Tensor = tuple[str, TensorInfo]


def identify(config: AdapterConfig, path: Path, tensors: Mapping[str, TensorInfo], stamp: Stamp | None = None) -> str:
    """Hash the tensors and the settings of an adapter, however the file orders them. Reads the file in small pieces.

    With a `stamp`, only the file that has it is read.
    """
    what = f"adapter {config.name!r}"
    shares = _share(sorted(tensors.items(), key=lambda item: item[1].start))
    hash_share = partial(_hash_tensors, what, path, stamp)
    with reading(what, path):
        if len(shares) == 1:
            found = [hash_share(shares[0])]
        else:
            with ThreadPoolExecutor(len(shares), "hash adapters") as threads:
                found = list(threads.map(hash_share, shares))
    digests = {key: digest for share in found for key, digest in share.items()}
    digest = hashlib.sha256(_line(["lorax adapter", 3, config.identity_settings()]))
    for key in sorted(digests):
        digest.update(digests[key])
    return digest.hexdigest()


def _share(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide tensors, in the order of the file, into shares of about the same size, one for each thread."""
    total = sum(info.stop - info.start for _, info in tensors)
    size = max(THREAD_BYTES, -(-total // NUM_THREADS))
    shares: list[list[Tensor]] = [[]]
    num_bytes = 0
    for key, info in tensors:
        if num_bytes >= size * len(shares):
            shares.append([])
        shares[-1].append((key, info))
        num_bytes += info.stop - info.start
    return shares


def _hash_tensors(what: str, path: Path, stamp: Stamp | None, tensors: Sequence[Tensor]) -> dict[str, bytes]:
    """Hash each tensor by itself, with its name and form."""
    digests = {}
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open_plain(path, stamp) as file:
        for key, info in tensors:
            digest = hashlib.sha256(_line([key, info.dtype, info.shape]))
            file.seek(info.start)
            bytes_left = info.stop - info.start
            while bytes_left:
                count = file.readinto(chunk[: min(bytes_left, CHUNK_BYTES)])
                if not count:
                    raise AdapterError(f"{what}: {path.name} became shorter while it was read")
                digest.update(chunk[:count])
                bytes_left -= count
            digests[key] = digest.digest()
    return digests


def _line(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
