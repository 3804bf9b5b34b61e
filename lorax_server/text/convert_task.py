"""A sandbox task that converts tokenizers which only transformers can load. It runs in the sandbox because adapter
files are untrusted.
"""

import json
import os
import resource
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lorax_server.sandbox.task import SandboxTask

# transformers needs 0.3 GiB, and 0.7 GiB with a vocabulary of 256k tokens.
CONVERT_TASK = SandboxTask(
    "lorax_server.text.convert_task:convert", cpu_s=60.0, memory_bytes=2**32, wall_s=600.0, is_long=True
)
MAX_FILE_BYTES = 2**28  # per file that the task writes
# Texts on which tokenizers differ: spaces, case, digits, scripts, bytes, special tokens.
SAMPLE_TEXTS = (
    "The quick brown fox, isn't it?  Two spaces\tand a tab.\n\n  Größe 日本語 👍🏽 1234567 don't",
    " leading space",
    "",
    "<s>[INST] <|im_start|>user\n</s> <|endoftext|> trailing ",
)


def convert(folder: Path, output_folder: Path, config_path: Path | None) -> bytes:
    """Write `tokenizer.json` and `converted.json`. Raise an error if the result differs from transformers.

    The tokenizer class depends on the model's config.json, which is `config_path` if it is not in `folder`.
    """
    with suppress(ValueError, OSError):  # the system limit is lower
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    # Otherwise tiktoken writes a copy to its cache.
    os.environ.update({"HOME": str(output_folder), "TMPDIR": str(output_folder), "TIKTOKEN_CACHE_DIR": ""})
    from transformers import AutoConfig  # noqa: PLC0415 - in the sandbox only

    config = None if config_path is None else AutoConfig.from_pretrained(config_path)
    loaded: Any = _load(folder, config)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(loaded).__name__} is not based on `tokenizers`")
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(output_folder / "tokenizer.json"))
    metadata = {"special_tokens": loaded.special_tokens_map, "split_special_tokens": bool(loaded.split_special_tokens)}
    (output_folder / "converted.json").write_text(json.dumps(metadata))
    _check(loaded, Tokenizer.from_file(str(output_folder / "tokenizer.json")), metadata["split_special_tokens"])
    return b""


def _load(folder: Path, config: Any) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - as above

    try:
        return AutoTokenizer.from_pretrained(folder, config=config)
    except Exception as error:
        if (folder / "tokenizer.model").exists() and find_spec("sentencepiece") is None:
            raise ImportError("tokenizer.model may need a package: pip install sentencepiece") from error
        raise


def _check(original: Any, converted: Tokenizer, split_special_tokens: bool) -> None:
    converted.encode_special_tokens = split_special_tokens
    texts = (*SAMPLE_TEXTS, *(f"a {token} b" for token in original.special_tokens_map.values()))
    for text in texts:
        for special in (True, False):
            expected = original(text, add_special_tokens=special)["input_ids"]
            if converted.encode(text, add_special_tokens=special).ids != expected:
                raise ValueError(
                    f"{type(original).__name__} encodes this text differently than its `tokenizers` backend: {text!r}"
                )
