"""Find a base model: a local folder, or a download from a hub or a bucket. Pickled weights are never downloaded."""

import logging
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from lorax_server.adapters.sources.hub import HubSource
from lorax_server.adapters.sources.remote import RemoteSource
from lorax_server.adapters.sources.s3 import S3Source
from lorax_server.cli.settings import check_folder
from lorax_server.errors import AdapterAccessError, AdapterNotFoundError, ConfigError, SourceError, WeightsError
from lorax_server.files.adapter_files import is_template_file

logger = logging.getLogger(__name__)

NEEDED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
UNNEEDED = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NUM_THREADS = 8  # concurrent files, as in huggingface_hub
HINTS = {
    "hub": "There is no local folder of this name either. Private models need HF_TOKEN, gated models also the "
    "consent of their owner, on the model's page",
    "s3": "Check the bucket's name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}


def find_model(
    model_id: str,
    revision: str | None,
    source: str,
    cache: Path,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
) -> Path:
    """Return the folder of a model, downloaded if necessary. `endpoint` is the address of the hub or S3 service."""
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return check_folder(folder)
    if source != "s3" and model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such folder; check the path")
    options: dict[str, Any] = {"noun": "model", "select_files": partial(choose_files, model_id), "num_threads": NUM_THREADS}
    try:
        if source == "s3":
            bucket, _, path = model_id.removeprefix("s3://").strip("/").partition("/")
            if not path:
                raise ConfigError(f"model {model_id!r}: a model of S3 is named as s3://bucket/path")
            bucket_source = S3Source(bucket, cache / "s3-models", endpoint_url=endpoint, **options)
            return check_folder(_download(bucket_source, path))
        # Unlike for adapters, the user's stored token is used: this user starts the server.
        make = partial(HubSource, cache, endpoint, token or get_token(), **options)
        return check_folder(_find_on_hub(make, f"{model_id}@{revision}" if revision else model_id, offline))
    except (AdapterAccessError, AdapterNotFoundError) as error:
        hint = "" if offline else f". {HINTS[source]}"
        raise ConfigError(f"{error}{hint}") from error
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise SourceError(f"{error}. --huggingface-hub-cache chooses the folder") from error
        raise


def _find_on_hub(make: Callable[..., HubSource], name: str, offline: bool) -> Path:
    """Download a model. If the hub is offline or fails, use the version in the cache."""
    failure = None
    if not offline:
        try:
            return _download(make(offline=False), name)
        except SourceError as error:
            failure = error
    cached = make(offline=True)
    try:
        files = cached.find(name, None)
    except AdapterNotFoundError as error:
        raise failure or error  # noqa: B904 - the failure has its own cause
    if failure is not None:
        logger.warning("%s; using the version in the cache", failure)
    return cached.fetch(files, list(files.sizes), None)


def _download(source: RemoteSource, name: str) -> Path:
    files = source.find(name, None)
    logger.info("model %r: downloading missing files of %d", name, len(files.sizes))
    return source.fetch(files, list(files.sizes), None)


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
    return chosen + [name for name in names if is_template_file(name)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
