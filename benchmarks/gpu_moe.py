"""Measure decode steps with the Qwen3-30B-A3B shape on one GPU through `LLM`, with adapters on attention and on
experts.

Model and adapters are random bfloat16 files. The model has fewer layers than the published model (`--layers`), so that
the files fit into memory. The sizes of the embedding, the head and the layers are the same. The byte floor is the time
to read at 4.1 TB/s all weights outside the experts, the experts that a step's tokens choose (if routing is balanced),
the KV cache, and the adapter factors that the tokens use.
"""

import statistics
from typing import Any, NamedTuple

from gpu_decode import BANDWIDTH, PROMPT, RUNS, SHORT_RUNS, SHORT_STEPS, STEPS, DecodeCase, measure
from gpu_models import list_shapes, make_tensors
from harness.engine import Adapter, Bench, StepClock, describe_device, make_parser
from harness.files import scratch_folder, write_adapters, write_model
from harness.report import Record, report

from lorax_server.llm import LLM

LAYERS, RANK = 12, 8
SIZES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GOAL, ADAPTER_GOAL = 1.35, 1.6  # relative to the byte floor
MAX_LENGTH = 1024
MEMORY = {"adapter_bytes": 24 * 2**30, "adapter_host_bytes": 34 * 2**30}
Linears = dict[str, tuple[int, int]]


class MoeCase(NamedTuple):
    name: str
    rows: int
    num_adapters: int
    folder: str  # prefix of the adapters' names
    goal: float


CASES = (
    MoeCase("1/base", 1, 0, "", GOAL),
    MoeCase("64/base", 64, 0, "", GOAL),
    MoeCase("16/16, attention", 16, 16, "attention", ADAPTER_GOAL),
    MoeCase("64/64, attention", 64, 64, "attention", ADAPTER_GOAL),
    MoeCase("64/64, experts", 64, 64, "experts", ADAPTER_GOAL),
)


def list_linears(config: Any) -> dict[str, Linears]:
    """Return outputs and inputs of the adapted linear layers, for adapters on attention and on experts."""
    hidden, inner, dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = (hidden, queries)
    expert = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    layers, experts = range(config.num_hidden_layers), range(config.num_experts)
    return {
        "attention": {f"model.layers.{i}.self_attn.{name}": size for i in layers for name, size in attention.items()},
        "experts": {
            f"model.layers.{i}.mlp.experts.{j}.{name}": size
            for i in layers
            for j in experts
            for name, size in expert.items()
        },
    }


def find_floor_ms(case: MoeCase, config: Any, linears: dict[str, Linears], context: float) -> float:
    """Return the time in milliseconds to read every byte once."""
    experts, top_k = config.num_experts, config.num_experts_per_tok
    share = 1 - (1 - top_k / experts) ** case.rows
    weights = config.vocab_size * config.hidden_size  # the head
    weights += sum(outputs * inputs for outputs, inputs in linears["attention"].values())
    weights += share * sum(outputs * inputs for outputs, inputs in linears["experts"].values())
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context * case.rows
    factors = RANK * sum(map(sum, linears[case.folder].values())) * case.num_adapters if case.num_adapters else 0
    if case.folder == "experts":
        factors *= top_k / experts  # a token uses only `top_k` experts of its adapter
    return 2 * (weights + cached + factors) / BANDWIDTH * 1e3


def main() -> None:
    parser = make_parser(__doc__, has_folder=False)
    parser.add_argument("--layers", type=int, help=f"number of layers (default: {LAYERS})")
    args = parser.parse_args()
    from transformers import Qwen3MoeConfig

    layers = args.layers or (2 if args.tiny else LAYERS)
    config = Qwen3MoeConfig(**TINY if args.tiny else SIZES, num_hidden_layers=layers)
    steps, num_runs = (SHORT_STEPS, SHORT_RUNS) if args.tiny else (STEPS, RUNS)
    linears, records = list_linears(config), list[Record]()
    print(f"{describe_device()}, {layers} layers")
    with scratch_folder() as folder:
        write_model(
            folder / "model", make_tensors(config, list_shapes(config)), config.to_dict() | {"dtype": "bfloat16"}
        )
        counts = {case.folder: case.num_adapters for case in sorted(CASES, key=lambda case: case.num_adapters)}
        for name in ("attention", "experts"):
            for written in write_adapters(
                folder / name, linears[name], min(counts[name], 4 if args.tiny else 64), RANK
            ):
                (folder / "adapters").mkdir(exist_ok=True)
                (folder / name / written).rename(folder / "adapters" / f"{name}-{written}")
        settings = {"max_length": MAX_LENGTH} | ({} if args.tiny else MEMORY)
        with LLM(folder / "model", folder / "adapters", max_num_seqs=64, **settings) as llm:
            bench = Bench(llm, StepClock(llm), config, folder)
            for case in CASES:
                names = sorted(path.name for path in (folder / "adapters").glob(f"{case.folder}-*"))
                adapters = tuple(Adapter(name) for name in names[: case.num_adapters])
                bench.load(adapters)
                decode = DecodeCase(case.name, case.rows, adapters)
                runs = [measure(bench, decode, steps) for _ in range(num_runs)]
                ms = statistics.median(run.ms for run in runs)
                floor = find_floor_ms(case, config, linears, PROMPT + steps / 2)
                print(f"{case.name:20}  {ms:6.2f} ms  floor {floor:6.2f} ms  {ms / floor:5.2f}", flush=True)
                goal = None if args.tiny else case.goal
                records.append(
                    Record(f"{case.name}, over its floor", ms / floor, "x", f"{floor:.2f} ms", goal, at_most=True)
                )
    report(records, args.json)


if __name__ == "__main__":
    main()
