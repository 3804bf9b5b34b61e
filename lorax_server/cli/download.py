"""Find a base model: a folder, or what a hub or a bucket has, fetched once. Pickled weights are never fetched."""

import errno
import glob
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
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

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
UNWANTED = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
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
    """The folder of a model. `endpoint` is that of the hub or of the S3 service; None: the usual one."""
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return check_folder(folder)
    if source == "s3":
        return check_folder(_from_s3(model_id, cache / "s3-models", endpoint))
    if model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such folder; check the path")
    with _explained(model_id, revision):
        return check_folder(_from_hub(model_id, revision, cache, token, endpoint, offline))


def choose_files(model_id: str, names: Sequence[str]) -> list[str]:
    """Of all files, those that a model is loaded from."""
    wanted = [name for name in names if _matches(name, WANTED) and not _matches(name, UNWANTED)]
    if not any(name.endswith(".safetensors") for name in wanted):
        is_pickled = any(_matches(name, PICKLED) for name in names)
        if is_pickled:
            raise WeightsError(
                f"model {model_id!r}: its weights are pickled only, which can run any code when they are read. Use "
                "https://huggingface.co/spaces/safetensors/convert, or load and save it with transformers "
                "(save_pretrained writes safetensors)"
            )
        raise WeightsError(f"model {model_id!r}: there are no weights (*.safetensors) in it; check the name")
    return wanted + [name for name in names if fnmatchcase(name, TEMPLATES)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- A hub ------------------------------------------------------------------------------------------------------------


def _from_hub(
    model_id: str, revision: str | None, cache: Path, token: str | None, endpoint: str | None, offline: bool
) -> Path:
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache, "token": token, "endpoint": endpoint}
    if offline:
        return _cached(model_id, where)
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(
            model_id, revision=revision or DEFAULT_REVISION, timeout=TIMEOUT_S
        )
    except UNREACHABLE as error:
        folder = _cached(model_id, where)
        logger.warning("model %r: the hub cannot be reached (%s); using what is here", model_id, type(error).__name__)
        return folder
    files = choose_files(model_id, [sibling.rfilename for sibling in info.siblings or ()])
    logger.info("model %r: fetching what is missing of %d files into %s", model_id, len(files), cache)
    return _snapshot(model_id, allow_patterns=[glob.escape(file) for file in files], **where)


def _cached(model_id: str, where: Mapping[str, Any]) -> Path:
    """What was fetched before, if all that is needed was."""
    patterns = {"allow_patterns": [*WANTED], "ignore_patterns": [*UNWANTED]}
    return _snapshot(model_id, local_files_only=True, **patterns, **where)


def _snapshot(model_id: str, **where: Any) -> Path:
    """Resumes and checks what it fetches."""
    return Path(
        snapshot_download(model_id, library_name="lorax_server", etag_timeout=TIMEOUT_S, tqdm_class=_Bar, **where)
    )


class _Bar(tqdm):
    """Shows how far it is on a terminal, and nowhere else."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"disable": not sys.stderr.isatty()})  # type: ignore[no-untyped-call]


@contextmanager
def _explained(model_id: str, revision: str | None) -> Iterator[None]:
    """What huggingface_hub says, in one line that says what to do."""
    try:
        yield
    except LoraxError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, *UNREACHABLE, OSError) as error:
        raise _explain(f"model {model_id!r}", revision, error) from error


def _explain(what: str, revision: str | None, error: Exception) -> LoraxError:
    for kind, said in (
        (HFValidationError, "there is no such folder, and a hub's names look like owner/name"),
        (GatedRepoError, "its owner has to allow you to use it: ask on its page, then set HF_TOKEN"),
        (RevisionNotFoundError, f"the hub has no revision {revision!r} of it; check --revision"),
        (
            RepositoryNotFoundError,
            "there is no such folder, and the hub has no such model, or it is private: check the name, or set HF_TOKEN",
        ),
    ):
        if isinstance(error, kind):
            return ConfigError(f"{what}: {said}")
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return SourceError(
            f"{what}: it is not in the cache, and the hub cannot be reached, or may not (HF_HUB_OFFLINE)"
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(what, error.response.status_code)
    if isinstance(error, httpx2.HTTPError):
        return SourceError(f"{what}: the connection broke ({type(error).__name__}); what came is kept, try again")
    return _not_stored(what, error)


def _refused(what: str, status: int) -> LoraxError:
    if status in (401, 403):
        return ConfigError(f"{what}: access is refused ({status}); check the name and the credentials (HF_TOKEN)")
    return SourceError(f"{what}: the answer has status {status}; try again later")


def _not_stored(what: str, error: Exception) -> LoraxError:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(f"{what}: the disk is full; make room, or choose another by --huggingface-hub-cache")
    reason = os.strerror(code) if code else str(error).partition("\n")[0]
    return SourceError(f"{what}: it cannot be stored: {reason}; see --huggingface-hub-cache")


# --- A bucket ---------------------------------------------------------------------------------------------------------


def _from_s3(model_id: str, cache: Path, endpoint: str | None) -> Path:
    """Into a folder named by what the files are, so that other files go elsewhere."""
    client, client_errors = _connect(endpoint)
    bucket, _, path = model_id.removeprefix("s3://").strip("/").partition("/")
    what = f"model {model_id!r}"
    if not path:
        raise ConfigError(f"{what}: a model of S3 is named as s3://bucket/path")
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{path}/")
        found = {item["Key"].removeprefix(f"{path}/"): item for page in pages for item in page.get("Contents", ())}
        if not found:
            raise ConfigError(f"{what}: the bucket has no such folder; check the name")
        files = choose_files(model_id, list(found))
        facts = [(bucket, path, file, found[file]["ETag"]) for file in files]
        folder = cache / hashlib.sha256(repr(facts).encode()).hexdigest()
        for file in files:
            _fetch(client, bucket, found[file], folder / file)
    except client_errors as error:
        status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        raise _refused_by_s3(what, status, error) from error
    except OSError as error:
        raise _not_stored(what, error) from error
    return folder


def _fetch(client: Any, bucket: str, item: Any, path: Path) -> None:
    """Comes under another name until all of it is here."""
    if path.is_file() and path.stat().st_size == item["Size"]:
        return
    logger.info("fetching %s, %d bytes", item["Key"], item["Size"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        client.download_file(bucket, item["Key"], str(part))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _refused_by_s3(what: str, status: int, error: Exception) -> LoraxError:
    if status == 404:
        return ConfigError(f"{what}: there is no such bucket or folder; check the name")
    if status in (401, 403):
        return ConfigError(
            f"{what}: the bucket refuses the credentials ({status}); check AWS_ACCESS_KEY_ID and the rest"
        )
    reason = f"status {status}" if status else type(error).__name__
    return SourceError(f"{what}: the bucket cannot be read ({reason}); check the address and the credentials")


def _connect(endpoint: str | None) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import boto3  # noqa: PLC0415 - an extra
        from boto3.exceptions import Boto3Error  # noqa: PLC0415 - an extra
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("models from S3 need boto3: pip install 'lorax_server[s3]'") from error
    # A session of our own: the default one belongs to the whole process.
    return boto3.Session().client("s3", endpoint_url=endpoint), (ClientError, BotoCoreError, Boto3Error)
