"""Finds a base model in a local folder, or downloads it from the hub or S3. Pickled weights are never downloaded."""

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
from lorax_server.errors import AdapterAccessError, AdapterNotFoundError, ConfigError, SourceError, WeightsError
from lorax_server.files.adapter_files import is_template_file
from lorax_server.files.names import MODEL_CONFIG_FILE

logger = logging.getLogger(__name__)

INCLUDED_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
EXCLUDED_PATTERNS = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NUM_THREADS = 8  # concurrent downloads, as in huggingface_hub
HINTS = {
    "hub": "There is no local folder with this name either. Private models require HF_TOKEN; gated models also require "
    "access, which you can request on the model page",
    "s3": "Check the bucket name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}


def find_model(
    model_id: str,
    revision: str | None,
    source: str,
    cache: Path,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
    *,
    check: Callable[[Path], None],
) -> Path:
    """Return the model folder, and download it if necessary. `endpoint` is the hub or S3 address.

    `check` raises an error for an unsupported model. It is called with a folder that may contain only config.json.
    """
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        check(folder)
        return folder
    if source != "s3" and model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such folder; check the path")
    options: dict[str, Any] = {
        "noun": "model",
        "select_files": partial(select_model_files, model_id),
        "num_threads": NUM_THREADS,
    }
    try:
        if source == "s3":
            bucket, _, path = model_id.removeprefix("s3://").strip("/").partition("/")
            if not path:
                raise ConfigError(f"model {model_id!r}: an S3 model must have the form s3://bucket/path")
            bucket_source = S3Source(bucket, cache / "s3-models", endpoint_url=endpoint, **options)
            return _download(check, bucket_source, path)
        # Unlike adapters, the model may use the stored token of the user who starts the server.
        make = partial(HubSource, cache, endpoint, token or get_token(), **options)
        return _find_on_hub(check, make, f"{model_id}@{revision}" if revision else model_id, offline)
    except (AdapterAccessError, AdapterNotFoundError) as error:
        hint = "" if offline else f". {HINTS[source]}"
        raise ConfigError(f"{error}{hint}") from error
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise SourceError(f"{error}. --huggingface-hub-cache chooses the folder") from error
        raise


def _find_on_hub(check: Callable[[Path], None], make: Callable[..., HubSource], name: str, offline: bool) -> Path:
    """Download a model and return its folder. If `offline` is set or the hub fails, return the cached version."""
    failure = None
    if not offline:
        try:
            return _download(check, make(offline=False), name)
        except SourceError as error:
            failure = error
    cached = make(offline=True)
    try:
        files = cached.find(name, None)
    except (AdapterNotFoundError, WeightsError) as error:
        if isinstance(error, WeightsError):  # an interrupted download left only config.json
            error = AdapterNotFoundError(f"model {name!r}: its weights are not found in the cache")
        raise failure or error  # noqa: B904 - the failure already has a cause
    if failure is not None:
        logger.warning("%s; using the version in the cache", failure)
    folder = cached.fetch(files, list(files.sizes), None)
    check(folder)
    return folder


def _download(check: Callable[[Path], None], source: RemoteSource, name: str) -> Path:
    files = source.find(name, None)
    check(source.fetch(files, [name for name in files.sizes if name == MODEL_CONFIG_FILE], None))
    logger.info("model %r: downloading the missing ones of %d files", name, len(files.sizes))
    return source.fetch(files, list(files.sizes), None)


def select_model_files(model_id: str, names: Collection[str]) -> list[str]:
    """Return the names of the files that are needed to load a model."""
    chosen = [name for name in names if _matches(name, INCLUDED_PATTERNS) and not _matches(name, EXCLUDED_PATTERNS)]
    if not any(name.endswith(".safetensors") for name in chosen):
        if any(_matches(name, PICKLED_PATTERNS) for name in names):
            raise WeightsError(
                f"model {model_id!r}: it has only pickled weights, which can execute code when loaded. Convert "
                "them with https://huggingface.co/spaces/safetensors/convert, or load the model with transformers and "
                "call save_pretrained, which writes safetensors"
            )
        raise WeightsError(f"model {model_id!r}: it contains no *.safetensors files; check the name")
    return chosen + [name for name in names if is_template_file(name)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
