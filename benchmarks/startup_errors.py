"""Measure the time from `lorax serve` to the error message, for models that cannot be served."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.report import Record, make_parser, report

GOAL_S = 2.0
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "AWQ": {**LLAMA, "quantization_config": {"quant_method": "awq"}},
    "vision model": {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
    "unknown model type": {"model_type": "novel", "architectures": ["NovelForCausalLM"]},
    "adapters, but a model type without adapters": {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]},
}


def write_config(folder: Path, config: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return ["--model-id", str(folder)]


def write_truncated_weights(folder: Path) -> list[str]:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    return write_config(folder, LLAMA)


def write_damaged_gguf(folder: Path) -> list[str]:
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    return ["--model-id", str(folder / "model.gguf")]


def write_adapter(folder: Path) -> list[str]:
    (folder / "adapter_config.json").write_text("{}")
    return ["--model-id", str(folder)]


CASES: dict[str, Callable[[Path], list[str]]] = {
    "no such folder": lambda folder: ["--model-id", str(folder / "nothing")],
    "unknown flag": lambda folder: ["--model-idd", str(folder)],
    **{name: lambda folder, config=config: write_config(folder, config) for name, config in CONFIGS.items()},  # type: ignore[misc]
    "adapter instead of a model": write_adapter,
    "truncated weights": write_truncated_weights,
    "damaged GGUF file": write_damaged_gguf,
}


def measure(name: str, folder: Path, rounds: int) -> tuple[float, str]:
    """Return the median time until `lorax serve` exits, in seconds, and its error message."""
    (folder / "adapters").mkdir(parents=True)
    flags = [*CASES[name](folder), "--no-hub", "--port", "0", "--adapters-dir", str(folder / "adapters")]
    seconds, message = [], ""
    for _ in range(rounds):
        started = time.monotonic()
        command = [sys.executable, "-m", "lorax_server.cli", "serve", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - started)
        assert done.returncode, f"{name}: the server started"
        message = done.stderr.strip().replace(str(folder), "FOLDER")
    return statistics.median(seconds), message


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs per case (default: %(default)s)")
    args = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(CASES):
            seconds, message = measure(name, Path(folder) / str(index), args.rounds)
            records.append(Record(name, seconds, "s", "", GOAL_S, at_most=True))
            print(f"{seconds:.2f} s  {message}", flush=True)
    report(records, args.json)


if __name__ == "__main__":
    main()
