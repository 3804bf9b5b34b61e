"""Find a base model: a folder, or a model of a hub or a bucket, fetched once. Pickled weights are never fetched."""

import errno
import glob
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.constants import DEFAULT_REVISION
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined] # public, but imported lazily

from lorax_server.adapters.sources.disk_budget import DiskBudget
from lorax_server.adapters.sources.s3 import S3Source
from lorax_server.cli.model_folder import check_folder
from lorax_server.errors import AdapterAccessError, AdapterNotFoundError, ConfigError, SourceError, WeightsError
from lorax_server.files.adapter_files import is_template

logger = logging.getLogger(__name__)

NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
UNNEEDED = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TIMEOUT_S = 10.0
THREADS = 8  # as many files at once as huggingface_hub fetches
UNREACHABLE = (httpx2.TransportError, hub_errors.OfflineModeIsEnabled)
# Mistakes of who named the model, by the error that shows them.
MISTAKES: Mapping[type[Exception], str] = {
    hub_errors.HFValidationError: "there is no such folder, and a hub's names look like owner/name",
    hub_errors.GatedRepoError: "its owner has to allow you to use it: ask on its page, then set HF_TOKEN",
    hub_errors.RevisionNotFoundError: "the hub has no revision {revision!r} of it; check --revision",
    hub_errors.RepositoryNotFoundError: (
        "there is no such folder, and the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    ),
    AdapterNotFoundError: "the bucket has no such folder, or there is no such bucket; check the name",
    AdapterAccessError: "the bucket refuses the credentials; check AWS_ACCESS_KEY_ID and the rest",
}
FAILURES: tuple[type[Exception], ...] = (*MISTAKES, *UNREACHABLE, hub_errors.HfHubHTTPError, OSError, SourceError)


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
    if source != "s3" and model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such folder; check the path")
    try:
        if source == "s3":
            return check_folder(_from_s3(model_id, cache / "s3-models", endpoint))
        return check_folder(_from_hub(model_id, revision, cache, token, endpoint, offline))
    except FAILURES as error:
        mistake = next((reason for kind, reason in MISTAKES.items() if isinstance(error, kind)), None)
        if mistake is not None:
            raise ConfigError(f"model {model_id!r}: {mistake.format(revision=revision)}") from error
        if isinstance(error, hub_errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            raise ConfigError(
                f"model {model_id!r}: access is refused ({error.response.status_code}); check the name and the "
                "credentials (HF_TOKEN)"
            ) from error
        raise SourceError(f"model {model_id!r}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    """Say in one line why a model could not be fetched, and what to do."""
    if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
        return "it is not in the cache, and the hub cannot be reached, or may not (HF_HUB_OFFLINE)"
    if isinstance(error, hub_errors.HfHubHTTPError):
        return f"the answer has status {error.response.status_code}; try again later"
    if isinstance(error, httpx2.HTTPError):
        return f"the connection broke ({type(error).__name__}); what came is kept, try again"
    cause = error.__cause__ if isinstance(error, SourceError) else error
    if not isinstance(cause, OSError):  # the S3 source says it
        return str(error).partition("': ")[2] or str(error)
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; make room, or choose another by --huggingface-hub-cache"
    reason = os.strerror(cause.errno) if cause.errno else str(cause).partition("\n")[0]
    return f"it cannot be stored: {reason}; see --huggingface-hub-cache"


def choose_files(model_id: str, names: Collection[str]) -> list[str]:
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
    return chosen + [name for name in names if is_template(name)]


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


# --- A bucket ---------------------------------------------------------------------------------------------------------


class _ModelSource(S3Source):
    noun = "model"


class _AnyRoom(DiskBudget):
    """No budget: a model takes the room that it needs, and stays."""

    @contextmanager
    def room_for(self, what: str, num_bytes: int, files: Collection[Path] = ()) -> Iterator[None]:  # noqa: ARG002
        yield


def _from_s3(model_id: str, cache: Path, endpoint: str | None) -> Path:
    """Fetch into a folder named by the files' content, so that changed files go elsewhere."""
    bucket, _, path = model_id.removeprefix("s3://").strip("/").partition("/")
    if not path:
        raise ConfigError(f"model {model_id!r}: a model of S3 is named as s3://bucket/path")
    choose = partial(choose_files, model_id)
    source = _ModelSource(
        bucket, cache, endpoint_url=endpoint, budget=_AnyRoom(cache), choose=choose, num_threads=THREADS
    )
    files = source.find(path, None)
    logger.info("model %r: fetching what is missing of %d files into %s", model_id, len(files.sizes), cache)
    return source.fetch(files, list(files.sizes), None)
