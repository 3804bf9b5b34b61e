"""Provides adapters and base models from an S3 bucket.

The source uses the server's credentials and ignores the tokens in requests. `download.py` explains why boto3's
transfers are not used.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lorax_server.adapters.sources.remote import RemoteSource
from lorax_server.adapters.sources.source import AdapterFiles
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, ConfigError, SourceError
from lorax_server.files.adapter_files import TEMPLATES_FOLDER

CHUNK_BYTES = 2**16
MD5_PATTERN = re.compile(r"[0-9a-f]{32}")
MAX_KEYS = 10_000
MAX_PAGES = 100  # limit for one listing, because a faulty server may return pages forever
RETRY_ADVICE = "try again later, or check the bucket's address and the server's credentials"


class S3Source(RemoteSource):
    """A source of adapters below `prefix` in a bucket. A name is `path/of/adapter` or
    `s3://bucket/prefix/path/of/adapter`.
    """

    kind = "s3"

    def __init__(
        self,
        bucket: str,
        cache_dir: Path,
        *,
        prefix: str = "",
        endpoint_url: str | None = None,
        client: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(cache_dir, **options)
        if self._budget is not None:
            self._budget.add_cache(cache_dir)
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._client = client or _make_client(endpoint_url, self._timeout_s)

    def authorize(self, name: str, token: str | None) -> None:  # noqa: ARG002 - see the module's docstring
        """Raise an error if the adapter folder does not exist. All clients have access."""
        with self._convert_s3_errors(name):
            listing = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._folder(name), MaxKeys=1)
        if not listing.get("Contents"):
            raise self._make_not_found_error(name)

    def find(self, name: str, token: str | None) -> AdapterFiles:  # noqa: ARG002
        folder = self._folder(name)
        listing, subfolders = self._list_objects(folder, name)
        if not listing:
            raise self._make_not_found_error(name)
        if f"{TEMPLATES_FOLDER}/" in subfolders:
            templates, _ = self._list_objects(f"{folder}{TEMPLATES_FOLDER}/", name)
            listing |= {f"{TEMPLATES_FOLDER}/{file}": item for file, item in templates.items()}
        files = self._select_files(listing)
        version = hashlib.sha256(repr([(file, *listing[file]) for file in files]).encode()).hexdigest()
        sizes, etags = {file: listing[file][0] for file in files}, {file: listing[file][1] for file in files}
        return AdapterFiles(self.kind, name, version, sizes, etags)

    def _repo_folder(self, name: str) -> Path:
        return self._cache_dir / hashlib.sha256(repr((self._bucket, self._folder(name))).encode()).hexdigest()

    def _blob_name(self, files: AdapterFiles, file: str) -> str:
        return hashlib.sha256(repr((file, files.sizes[file], files.tags[file])).encode()).hexdigest()

    def _connect(self, token: str | None) -> AbstractContextManager[Any]:  # noqa: ARG002
        return nullcontext(self._client)

    @contextmanager
    def _open(self, client: Any, files: AdapterFiles, file: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        range_header = {"Range": f"bytes={offset}-"} if offset else {}
        with self._convert_s3_errors(files.name):
            reply = client.get_object(**self._make_object_args(files, file), **range_header)
            with closing(reply["Body"]) as body:
                # Servers may ignore the range and send the whole file.
                yield offset if "ContentRange" in reply else 0, body.iter_chunks(CHUNK_BYTES)

    def _make_checksum_test(self, client: Any, files: AdapterFiles, file: str) -> Callable[[Path], bool]:
        with self._convert_s3_errors(files.name):
            return partial(
                _is_valid, head=client.head_object(**self._make_object_args(files, file), ChecksumMode="ENABLED")
            )

    def _make_object_args(self, files: AdapterFiles, file: str) -> dict[str, str]:
        # The ETag selects the version that `find` returned.
        return {"Bucket": self._bucket, "Key": self._folder(files.name) + file, "IfMatch": files.tags[file]}

    def _list_objects(self, folder: str, name: str) -> tuple[dict[str, tuple[int, str]], set[str]]:
        """Return the size and ETag of each file in a folder, and the names of its subfolders."""
        # The delimiter excludes subfolder contents.
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=folder, Delimiter="/", PaginationConfig={"MaxItems": MAX_KEYS}
        )
        objects: dict[str, tuple[int, str]] = {}
        subfolders: set[str] = set()
        with self._convert_s3_errors(name):
            for page in islice(pages, MAX_PAGES):
                items = page.get("Contents", ())
                objects |= {item["Key"].removeprefix(folder): (item["Size"], item["ETag"]) for item in items}
                subfolders |= {item["Prefix"].removeprefix(folder) for item in page.get("CommonPrefixes", ())}
        return objects, subfolders

    def _folder(self, name: str) -> str:
        """Return the S3 key prefix for an adapter name."""
        path = name
        if name.startswith("s3://"):
            start = f"s3://{self._bucket}/{self._prefix}".rstrip("/") + "/"
            path = name.removeprefix(start) if name.startswith(start) else ""
        names = path.rstrip("/").split("/")
        # Servers that store keys as files may interpret these components as paths.
        if "\\" in path or set(names) & {"", ".", ".."}:
            raise self._make_not_found_error(name)
        return "/".join([self._prefix, *names]).lstrip("/") + "/"

    @contextmanager
    def _convert_s3_errors(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - an extra

        label = self._label(name)
        try:
            yield
        except ClientError as error:
            raise self._make_status_error(name, error.response["ResponseMetadata"].get("HTTPStatusCode", 0)) from error
        except KeyError as error:
            raise SourceError(
                f"{label}: the response has no {error}; check that the address is an S3 bucket"
            ) from error
        except BotoCoreError as error:
            raise SourceError(f"{label}: the bucket cannot be read ({type(error).__name__}); {RETRY_ADVICE}") from error

    def _make_status_error(self, name: str, status: int) -> AdapterError:
        label = self._label(name)
        if status in (401, 403):
            return AdapterAccessError(f"{label}: the bucket rejects the server's credentials ({status}); check them")
        if status == 404:
            return self._make_not_found_error(name)
        if status == 412:
            return SourceError(f"{label}: its files changed during the download; try again")
        return SourceError(f"{label}: the bucket returned status {status}; {RETRY_ADVICE}")

    def _make_not_found_error(self, name: str) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"{self._label(name)}: no such folder in the server's bucket; check the name")


def _make_client(endpoint_url: str | None, timeout_s: float) -> Any:
    try:
        import boto3  # noqa: PLC0415 - an extra
        from botocore.config import Config  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("models and adapters from S3 need boto3: pip install 'lorax_server[s3]'") from error
    retries = {"total_max_attempts": 2, "mode": "standard"}
    config = Config(connect_timeout=timeout_s, read_timeout=timeout_s, retries=retries)
    # A separate session: the default session is shared by the whole process.
    return boto3.Session().client("s3", endpoint_url=endpoint_url, config=config)


def _is_valid(path: Path, head: Mapping[str, Any]) -> bool:
    """Return True if the file matches the SHA-256 checksum or the MD5 hash in the ETag, or if neither exists."""
    expected, etag = str(head.get("ChecksumSHA256", "")), str(head.get("ETag", "")).strip('"')
    # With customer encryption keys, the ETag looks like an MD5 checksum but is not.
    is_encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    with path.open("rb") as file:
        # A dash marks a multipart upload, whose checksum is computed from the checksums of its parts.
        if expected and "-" not in expected + etag:
            return base64.b64encode(hashlib.file_digest(file, "sha256").digest()).decode() == expected
        if MD5_PATTERN.fullmatch(etag) and not is_encrypted:
            return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest() == etag
    return True
