"""Find a base model: a folder, or a model of a hub or a bucket, fetched once. Pickled weights are never fetched."""

import errno
import glob
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import DEFAULT_REVISION
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined] # public, but imported lazily

from lorax_server.cli.model_folder import check_folder
from lorax_server.errors import ConfigError, LoraxError, SourceError, WeightsError

logger = logging.getLogger(__name__)

NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
UNNEEDED = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
TEMPLATES = "additional_chat_templates/*.jinja"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TIMEOUT_S = 10.0
UNREACHABLE = (httpx2.TransportError, OfflineModeIsEnabled)


def find_model(
    model_id: str,
    revision: str | None,
    source: str,
    cache: Path,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
) -> Path:
    """Return the folder of a model, and fetch it if it is not here. `endpoint` is the hub's or the S3 service's."""
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return check_folder(folder)
    if source == "s3":
        return check_folder(_from_s3(model_id, cache / "s3-models", endpoint))
    if model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such folder; check the path")
    with _explaining(model_id, revision):
        return check_folder(_from_hub(model_id, revision, cache, token, endpoint, offline))


def choose_files(model_id: str, names: Sequence[str]) -> list[str]:
    """Choose the files that a model is loaded from."""
    chosen = [name for name in names if _matches(name, NEEDED) and not _matches(name, UNNEEDED)]
    if not any(name.endswith(".safetensors") for name in chosen):
        if any(_matches(name, PICKLED) for name in names):
            raise WeightsError(
                f"model {model_id!r}: its weights are pickled only, which can run any code when they are read. Use "
                "https://huggingface.co/spaces/safetensors/convert, or load and save it with transformers "
                "(save_pretrained writes safetensors)"
            )
        raise WeightsError(f"model {model_id!r}: there are no weights (*.safetensors) in it; check the name")
    return chosen + [name for name in names if fnmatchcase(name, TEMPLATES)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- A hub ------------------------------------------------------------------------------------------------------------


def _from_hub(
    model_id: str, revision: str | None, cache: Path, token: str | None, endpoint: str | None, offline: bool
) -> Path:
    where = {"revision": revision, "cache_dir": cache, "token": token, "endpoint": endpoint}
    how = {"library_name": "lorax_server", "etag_timeout": TIMEOUT_S, "tqdm_class": _Bar}
    snapshot = partial(snapshot_download, model_id, **where, **how)  # resumes, and checks the files
    cached = partial(snapshot, local_files_only=True, allow_patterns=[*NEEDED], ignore_patterns=[*UNNEEDED])
    if offline:
        return Path(cached())
    try:
        api = HfApi(endpoint=endpoint, token=token)
        info = api.model_info(model_id, revision=revision or DEFAULT_REVISION, timeout=TIMEOUT_S)
    except UNREACHABLE as error:
        folder = Path(cached())
        logger.warning("model %r: the hub cannot be reached (%s); using what is here", model_id, type(error).__name__)
        return folder
    files = choose_files(model_id, [sibling.rfilename for sibling in info.siblings or ()])
    logger.info("model %r: fetching what is missing of %d files into %s", model_id, len(files), cache)
    return Path(snapshot(allow_patterns=[glob.escape(file) for file in files]))


class _Bar(tqdm):
    """Shows the progress on a terminal, and nowhere else."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"disable": not sys.stderr.isatty()})  # type: ignore[no-untyped-call]


@contextmanager
def _explaining(model_id: str, revision: str | None) -> Iterator[None]:
    """Turn errors of huggingface_hub into one line that says what to do."""
    try:
        yield
    except LoraxError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, *UNREACHABLE, OSError) as error:
        raise _explain(f"model {model_id!r}", revision, error) from error


def _explain(model: str, revision: str | None, error: Exception) -> LoraxError:
    for kind, reason in (
        (HFValidationError, "there is no such folder, and a hub's names look like owner/name"),
        (GatedRepoError, "its owner has to allow you to use it: ask on its page, then set HF_TOKEN"),
        (RevisionNotFoundError, f"the hub has no revision {revision!r} of it; check --revision"),
        (
            RepositoryNotFoundError,
            "there is no such folder, and the hub has no such model, or it is private: check the name, or set HF_TOKEN",
        ),
    ):
        if isinstance(error, kind):
            return ConfigError(f"{model}: {reason}")
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return SourceError(
            f"{model}: it is not in the cache, and the hub cannot be reached, or may not (HF_HUB_OFFLINE)"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return ConfigError(f"{model}: access is refused ({status}); check the name and the credentials (HF_TOKEN)")
        return SourceError(f"{model}: the answer has status {status}; try again later")
    if isinstance(error, httpx2.HTTPError):
        return SourceError(f"{model}: the connection broke ({type(error).__name__}); what came is kept, try again")
    return _not_stored(model, error)


def _not_stored(model: str, error: Exception) -> LoraxError:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(f"{model}: the disk is full; make room, or choose another by --huggingface-hub-cache")
    reason = os.strerror(code) if code else str(error).partition("\n")[0]
    return SourceError(f"{model}: it cannot be stored: {reason}; see --huggingface-hub-cache")


# --- A bucket ---------------------------------------------------------------------------------------------------------


def _from_s3(model_id: str, cache: Path, endpoint: str | None) -> Path:
    """Fetch into a folder named by the files' content, so that changed files go elsewhere."""
    client, client_errors = _connect(endpoint)
    bucket, _, path = model_id.removeprefix("s3://").strip("/").partition("/")
    model = f"model {model_id!r}"
    if not path:
        raise ConfigError(f"{model}: a model of S3 is named as s3://bucket/path")
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{path}/")
        items = {item["Key"].removeprefix(f"{path}/"): item for page in pages for item in page.get("Contents", ())}
        if not items:
            raise ConfigError(f"{model}: the bucket has no such folder; check the name")
        files = choose_files(model_id, list(items))
        version = [(bucket, path, file, items[file]["ETag"]) for file in files]
        folder = cache / hashlib.sha256(repr(version).encode()).hexdigest()
        for file in files:
            _fetch(client, bucket, items[file], folder / file)
    except client_errors as error:
        raise _explain_s3(model, error) from error
    except OSError as error:
        raise _not_stored(model, error) from error
    return folder


def _fetch(client: Any, bucket: str, item: Any, path: Path) -> None:
    """Fetch a file unless it is here, under another name until it is complete."""
    if path.is_file() and path.stat().st_size == item["Size"]:
        return
    logger.info("fetching %s, %d bytes", item["Key"], item["Size"])
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        client.download_file(bucket, item["Key"], str(incomplete))
        os.replace(incomplete, path)
    finally:
        incomplete.unlink(missing_ok=True)


def _explain_s3(model: str, error: Exception) -> LoraxError:
    status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status == 404:
        return ConfigError(f"{model}: there is no such bucket or folder; check the name")
    if status in (401, 403):
        return ConfigError(
            f"{model}: the bucket refuses the credentials ({status}); check AWS_ACCESS_KEY_ID and the rest"
        )
    reason = f"status {status}" if status else type(error).__name__
    return SourceError(f"{model}: the bucket cannot be read ({reason}); check the address and the credentials")


def _connect(endpoint: str | None) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import boto3  # noqa: PLC0415 - an extra
        from boto3.exceptions import Boto3Error  # noqa: PLC0415 - an extra
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("models from S3 need boto3: pip install 'lorax_server[s3]'") from error
    # A session of our own: the default one belongs to the whole process.
    return boto3.Session().client("s3", endpoint_url=endpoint), (ClientError, BotoCoreError, Boto3Error)
