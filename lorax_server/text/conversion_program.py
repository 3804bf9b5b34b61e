"""Convert the tokenizer of a folder into one that `tokenizers` reads, in a process of its own: this needs transformers.

An adapter's files are untrusted, so the process has limits, and its parent gives it no secrets.

`python -m lorax_server.text.conversion_program FOLDER OUT [CONFIG]` writes `tokenizer.json` and `converted.json` to
OUT. The class of the tokenizer depends on the model's config.json, which is CONFIG where it is not in FOLDER.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ALARM_S = 120  # the parent ends this process sooner, if it still lives
MAX_MEMORY = 2**32  # transformers alone needs 0.3 GiB, with a vocabulary of 256k tokens 0.7 GiB
MAX_WRITTEN = 2**28  # bytes of a file
# Texts that tokenizers treat differently: spaces, cases, digits, scripts, bytes, special tokens.
SAMPLES = (
    "The quick brown fox, isn't it?  Two spaces\tand a tab.\n\n  Größe 日本語 👍🏽 1234567 don't",
    " leading space",
    "",
    "<s>[INST] <|im_start|>user\n</s> <|endoftext|> trailing ",
)


def convert(folder: Path, out: Path, config_path: Path | None) -> None:
    """Write the converted tokenizer. Raise an error if it does not do what transformers does."""
    from transformers import AutoConfig  # noqa: PLC0415 - after the limits, and never in the server

    config = None if config_path is None else AutoConfig.from_pretrained(config_path)
    loaded: Any = _load(folder, config)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(loaded).__name__} is not based on `tokenizers`")
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))
    facts = {"special_tokens": loaded.special_tokens_map, "split_special_tokens": bool(loaded.split_special_tokens)}
    (out / "converted.json").write_text(json.dumps(facts))
    _check(loaded, Tokenizer.from_file(str(out / "tokenizer.json")), facts["split_special_tokens"])


def _load(folder: Path, config: Any) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - as above

    try:
        return AutoTokenizer.from_pretrained(folder, config=config)
    except Exception as error:
        if (folder / "tokenizer.model").exists() and find_spec("sentencepiece") is None:
            raise ImportError("tokenizer.model may need a package: pip install sentencepiece") from error
        raise


def _check(loaded: Any, written: Tokenizer, split_special_tokens: bool) -> None:
    written.encode_special_tokens = split_special_tokens
    texts = (*SAMPLES, *(f"a {token} b" for token in loaded.special_tokens_map.values()))
    for text in texts:
        for special in (True, False):
            expected = loaded(text, add_special_tokens=special)["input_ids"]
            if written.encode(text, add_special_tokens=special).ids != expected:
                raise ValueError(f"{type(loaded).__name__} does what its `tokenizers` backend does not: {text!r}")


def limit_process() -> None:
    """Limit the process. RLIMIT_DATA counts its allocations, RLIMIT_AS also libraries: torch maps gigabytes of them."""
    limits = {resource.RLIMIT_DATA: MAX_MEMORY, resource.RLIMIT_FSIZE: MAX_WRITTEN, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        with suppress(ValueError, OSError):  # the system's own limit is lower, or it has no such limit
            resource.setrlimit(kind, (limit, limit))
    signal.alarm(ALARM_S)


def main() -> None:
    limit_process()
    folder, out, *rest = map(Path, sys.argv[1:])
    convert(folder, out, rest[0] if rest else None)


if __name__ == "__main__":
    main()
