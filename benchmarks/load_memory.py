"""Measure the anonymous memory while a Qwen3-MoE is loaded on a CPU, relative to the memory after loading.

The model has random bfloat16 weights (1.3 GB) with one matrix per expert or with all experts in one tensor. Each case
runs in a separate process, with and without process tuning (docs/process-tuning.md).
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness.report import Record, make_parser, report
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from lorax_server.config import ModelConfig
from lorax_server.models.registry import get_model
from lorax_server.process_tuning import TUNING_VARIABLE

CONFIG = Qwen3MoeConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=1024,
    moe_intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=64,
    num_experts_per_tok=8,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    architectures=["Qwen3MoeForCausalLM"],
)
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_experts": 4}
GOAL = 1.3
SAMPLE_INTERVAL_S = 0.0005


def make_tensors(config: Qwen3MoeConfig, *, is_fused: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a random model, by name."""
    size, inner, head_dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    query_size, kv_size = (getattr(config, f"num_{each}_heads") * head_dim for each in ("attention", "key_value"))

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()

    yield "model.embed_tokens.weight", draw(config.vocab_size, size)
    yield "model.norm.weight", draw(size)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            **{"input_layernorm": (size,), "post_attention_layernorm": (size,)},
            **{"self_attn.q_proj": (query_size, size), "self_attn.o_proj": (size, query_size)},
            **{"self_attn.k_proj": (kv_size, size), "self_attn.v_proj": (kv_size, size)},
            **{"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)},
            "mlp.gate": (config.num_experts, size),
        }.items():
            yield f"{prefix}.{name}.weight", draw(*shape)
        if is_fused:
            yield f"{prefix}.mlp.experts.gate_up_proj", draw(config.num_experts, 2 * inner, size)
            yield f"{prefix}.mlp.experts.down_proj", draw(config.num_experts, size, inner)
            continue
        for expert in range(config.num_experts):
            for name in ("gate", "up"):
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", draw(inner, size)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", draw(size, inner)


def measure_in_child(folder: Path, dtype: str, *, is_tuned: bool) -> float:
    environment = {**os.environ, TUNING_VARIABLE: str(int(is_tuned)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--load", str(folder), "--dtype", dtype]
    return float(subprocess.check_output(command, env=environment, text=True).split()[-1])


def load(folder: Path, dtype: str) -> float:
    """Load a model. Return the peak of the anonymous memory, relative to the memory of the loaded model."""
    is_loading, peak, before = True, 0, read_anonymous_bytes()

    def watch() -> None:
        nonlocal peak
        while is_loading:
            peak = max(peak, read_anonymous_bytes())
            time.sleep(SAMPLE_INTERVAL_S)

    sys.setswitchinterval(SAMPLE_INTERVAL_S)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    model = get_model(ModelConfig(folder, dtype=dtype))
    is_loading = False
    watcher.join()
    ctypes.CDLL(None).malloc_trim(0)
    after = read_anonymous_bytes()
    del model
    return (peak - before) / (after - before)


def read_anonymous_bytes() -> int:
    """Return the resident memory of this process without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this script requires Linux")


def main(args: argparse.Namespace) -> None:
    config = Qwen3MoeConfig(**{**CONFIG.to_dict(), **TINY}) if args.tiny else CONFIG
    records = []
    for is_fused in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            save_file(dict(make_tensors(config, is_fused=is_fused)), Path(folder, "model.safetensors"))
            for dtype in ("bfloat16", "float32"):
                name = f"{'one tensor' if is_fused else 'one matrix per expert'}, {dtype}"
                for is_tuned in (True, False):
                    ratios = [measure_in_child(Path(folder), dtype, is_tuned=is_tuned) for _ in range(args.runs)]
                    label = name if is_tuned else f"{name}, without tuning"
                    goal = GOAL if is_tuned and not args.tiny else None
                    records.append(Record(label, max(ratios), "x (highest run)", "", goal, at_most=True))
    report(records, args.json)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="processes for each case")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model, to check the script")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.load is None:
        main(parsed)
    else:
        print(load(parsed.load, parsed.dtype))
