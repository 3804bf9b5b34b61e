"""Finds a base model in a local folder, or downloads it from the hub or S3. Pickled weights are never downloaded."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from lorax_server.adapters.sources.hub import HubSource
from lorax_server.adapters.sources.remote import RemoteSource
from lorax_server.adapters.sources.s3 import S3Source
from lorax_server.cli.packaged_models import find_local_model
from lorax_server.errors import AdapterAccessError, AdapterNotFoundError, ConfigError, SourceError, WeightsError
from lorax_server.files.adapter_files import is_template_file
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.gguf.container import SPLIT_NAME_PATTERN
from lorax_server.gguf.model_folder import GGUF_SUFFIX, find_model_folder

logger = logging.getLogger(__name__)

CheckFolder = Callable[[Path], None]  # raises an error if the model in a folder cannot be served

INCLUDED_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
EXCLUDED_PATTERNS = ("*/*", "consolidated*.safetensors", "adapter_*", "training_args*", "trainer_state*", "optimizer*")
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NUM_THREADS = 8  # concurrent downloads, as in huggingface_hub
# Hub names of GGUF models: owner/repo:Q4_K_M, or owner/repo/folder/file.gguf.
GGUF_NAME_PATTERN = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<type>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))")
PROJECTOR_NAME_PATTERN = re.compile(r"(^|/|-)mmproj")  # files for image input
MAX_LISTED_FILES = 20
SOURCE_HINTS = {
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
    check: CheckFolder,
) -> Path:
    """Return the model folder, and download it if necessary. `endpoint` is the hub or S3 address.

    `check` raises an error for an unsupported model. It is called with a folder that may contain only config.json.
    """
    path = find_local_model(model_id)
    if path is not None:
        folder = find_model_folder(path)
        check(folder)
        return folder
    repo, gguf = _split_gguf_name(model_id)
    if source != "s3" and model_id.startswith(("/", ".", "~", "\\")):
        raise ConfigError(f"model {model_id!r}: there is no such file or folder; check the path")
    select = partial(select_model_files, model_id) if gguf is None else partial(select_gguf_files, model_id, gguf)
    options: dict[str, Any] = {"kind": "model", "select_files": select, "num_threads": NUM_THREADS}
    try:
        if source == "s3":
            bucket, _, key = model_id.removeprefix("s3://").strip("/").partition("/")
            if not key:
                raise ConfigError(f"model {model_id!r}: an S3 model must have the form s3://bucket/path")
            bucket_source = S3Source(bucket, cache / "s3-models", endpoint_url=endpoint, **options)
            return _download(check, bucket_source, key)
        # Unlike adapters, the model may use the stored token of the user who starts the server.
        make = partial(HubSource, cache, endpoint, token or get_token(), **options)
        name = f"{repo}@{revision}" if revision else repo
        if gguf is None:
            return _find_on_hub(check, make, name, offline)
        downloaded = _find_on_hub(None, make, name, offline)  # the config is in the GGUF file
        names = [path.relative_to(downloaded).as_posix() for path in downloaded.rglob(f"*{GGUF_SUFFIX}")]
        folder = find_model_folder(downloaded / select_gguf_files(model_id, gguf, names)[0])
        check(folder)
        return folder
    except (AdapterAccessError, AdapterNotFoundError) as error:
        hint = "" if offline else f". {SOURCE_HINTS[source]}"
        raise ConfigError(f"{error}{hint}") from error
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise SourceError(f"{error}. --huggingface-hub-cache chooses the folder") from error
        raise


def _find_on_hub(check: CheckFolder | None, make_source: Callable[..., HubSource], name: str, offline: bool) -> Path:
    """Download a model and return its folder. If `offline` is set or the hub fails, return the cached version."""
    failure = None
    if not offline:
        try:
            return _download(check, make_source(offline=False), name)
        except SourceError as error:
            failure = error
    cached = make_source(offline=True)
    try:
        files = cached.find(name, None)
    except (AdapterNotFoundError, WeightsError) as error:
        if isinstance(error, WeightsError):  # an interrupted download left only config.json
            error = AdapterNotFoundError(f"model {name!r}: its weights are not found in the cache")
        raise failure or error  # noqa: B904 - the failure already has a cause
    if failure is not None:
        logger.warning("%s; using the version in the cache", failure)
    folder = cached.fetch(files, list(files.sizes), None)
    if check is not None:
        check(folder)
    return folder


def _download(check: CheckFolder | None, source: RemoteSource, name: str) -> Path:
    files = source.find(name, None)
    if check is not None:
        check(source.fetch(files, [name for name in files.sizes if name == MODEL_CONFIG_FILE], None))
    logger.info("model %r: downloading the missing ones of %d files", name, len(files.sizes))
    return source.fetch(files, list(files.sizes), None)


def select_model_files(model_id: str, names: Collection[str]) -> list[str]:
    """Return the names of the files that are needed to load a model."""
    chosen = [
        name for name in names if _matches_any(name, INCLUDED_PATTERNS) and not _matches_any(name, EXCLUDED_PATTERNS)
    ]
    if not any(name.endswith(".safetensors") for name in chosen):
        if any(_matches_any(name, PICKLED_PATTERNS) for name in names):
            raise WeightsError(
                f"model {model_id!r}: it has only pickled weights, which can execute code when loaded. Convert "
                "them with https://huggingface.co/spaces/safetensors/convert, or load the model with transformers and "
                "call save_pretrained, which writes safetensors"
            )
        files = [name for name in names if name.endswith(GGUF_SUFFIX)]
        if files:
            raise WeightsError(f"model {model_id!r}: {_list_gguf_files(files)}; name one, as in {model_id}/{files[0]}")
        raise WeightsError(f"model {model_id!r}: it contains no *.safetensors files; check the name")
    return chosen + [name for name in names if is_template_file(name)]


def _split_gguf_name(model_id: str) -> tuple[str, str | None]:
    """Return the hub repository, and the file or quantization type for names such as `owner/repo:Q4_K_M`."""
    match = GGUF_NAME_PATTERN.fullmatch(model_id)
    if match is not None:
        return match["repo"], match["file"] or match["type"]
    if model_id.endswith(GGUF_SUFFIX):
        raise ConfigError(f"model {model_id!r}: there is no such file; check the path, or use owner/repo/file.gguf")
    return model_id, None


def select_gguf_files(model_id: str, quantization_type: str, names: Collection[str]) -> list[str]:
    """Return the files of one GGUF model: one file, or all parts of a split file.

    `quantization_type` can also be a file name.
    """
    files = sorted(name for name in names if name.endswith(GGUF_SUFFIX) and not PROJECTOR_NAME_PATTERN.search(name))
    if not quantization_type.endswith(GGUF_SUFFIX):
        pattern = re.compile(rf"(?:.*[-._/])?{re.escape(quantization_type)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
        chosen = [name for name in files if pattern.fullmatch(name)]
    else:
        chosen = [
            name
            for name in files
            if name == quantization_type or _split_stem(name) == _split_stem(quantization_type) is not None
        ]
    stems = {_split_stem(name) or name for name in chosen}
    if len(stems) != 1:
        problem = f"several files match {quantization_type!r}" if stems else f"no file matches {quantization_type!r}"
        raise ConfigError(f"model {model_id!r}: {problem}; {_list_gguf_files(chosen or files)}")
    return chosen


def _split_stem(name: str) -> str | None:
    """Return the name that the parts of a split file share, or None for other files."""
    folder, _, file = name.rpartition("/")
    match = SPLIT_NAME_PATTERN.fullmatch(file)
    return None if match is None else f"{folder}/{match[1]}-of-{match[3]}"


def _list_gguf_files(names: Sequence[str]) -> str:
    if not names:
        return "it contains no GGUF files"
    more = ", ..." if len(names) > MAX_LISTED_FILES else ""
    return f"it contains {', '.join(names[:MAX_LISTED_FILES])}{more}"


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
