"""Measure prefill and decode for a small Qwen3-MoE in float32 on a CPU, and compare with transformers.

The model has random weights and 64 experts, 8 of which process each token. Both systems run in the same process.
transformers runs with the fastest of its expert implementations. Each value is the best of several alternating runs.
"""

from typing import Any

import torch
from cpu_forward import measure_decode, measure_prefill
from harness.models import VOCAB, build_ours
from harness.report import Record, make_parser, report
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=64,
    num_experts_per_tok=8,
    max_position_embeddings=4096,
)
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8}
GOAL = 1.5  # speed relative to transformers
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
BATCH_SIZES, CONTEXT, RUNS = (1, 8, 32), 256, 8


def measure(theirs: Any, ours: Any, runs: int) -> list[Record]:
    """Return a record for each case. The peer is the fastest expert implementation in transformers."""
    found: list[list[Record]] = [[] for _ in range(1 + len(BATCH_SIZES))]
    for name in IMPLEMENTATIONS:
        theirs.set_experts_implementation(name)
        label = f"Qwen3-MoE, {name}"
        if name != "batched_mm":  # copies the matrices of every token, so prefill takes minutes
            found[0].append(measure_prefill(label, ours, theirs, 8, CONTEXT, max(1, runs // 4), GOAL))
        for records, batch in zip(found[1:], BATCH_SIZES, strict=True):
            records.append(measure_decode(label, ours, theirs, batch, CONTEXT, runs, GOAL))
    return [min(records, key=lambda record: record.value) for records in found]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="run a tiny model, to check the script")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    config = Qwen3MoeConfig(**{**CONFIG.to_dict(), **TINY}) if args.tiny else CONFIG
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_config(config).eval()
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        ours = build_ours(config, theirs.state_dict())
        records = measure(theirs, ours, 1 if args.tiny else RUNS)
    report(records, args.json)


if __name__ == "__main__":
    main()
