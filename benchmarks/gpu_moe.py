"""Measure decode steps and prompts with the Qwen3-30B-A3B shape on one GPU through `LLM`, with adapters on attention
and on experts. `--shape deepseek` measures the DeepSeek-V2-Lite shape, with multi-head latent attention, without
adapters.

Model and adapters are random bfloat16 files. The model has fewer layers than the published model (`--layers`), so that
the files fit into memory. The sizes of the embedding, the head and the layers are the same. The byte floor is the time
to read at 4.1 TB/s all weights outside the experts, the experts that a step's tokens choose (if routing is balanced),
the KV cache, and the adapter factors that the tokens use. Prompts are compared with the time that their matrix products
and attention take at 790 TFLOP/s.
"""

import math
import statistics
import time
from typing import Any, NamedTuple

from gpu_decode import BANDWIDTH, PROMPT, RUNS, SHORT_RUNS, SHORT_STEPS, STEPS, DecodeCase, measure
from gpu_models import Shapes, list_shapes, make_tensors
from harness.engine import Adapter, Bench, StepClock, add_quantize_flag, describe_device, make_parser
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
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
TINY_DEEPSEEK = DEEPSEEK | {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2},
}
GOAL, ADAPTER_GOAL = 1.35, 1.6  # relative to the byte floor
PROMPTS, PROMPT_GOAL, FLOPS = 8, 0.6, 790e12  # prompts of `PROMPT_TOKENS` tokens; share of the possible speed
PROMPT_TOKENS, TINY_PROMPT_TOKENS = 1024, 64
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


def find_expert_share(config: Any, shapes: Shapes) -> float:
    """Return the share of the experts that one token uses."""
    num_experts = next(shape[0] for name, shape in shapes.items() if ".experts." in name)
    return float(config.num_experts_per_tok / num_experts)


def count_weights(config: Any, shapes: Shapes) -> tuple[int, int, int]:
    """Return the weights of the head, of all experts, and of the other matrices in layers."""
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    others = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and ".experts." not in name)
    return config.vocab_size * config.hidden_size, experts, others


def find_floor_ms(case: MoeCase, config: Any, shapes: Shapes, linears: dict[str, Linears], context: float) -> float:
    """Return the time in milliseconds to read every byte once. All weights have 16 bits."""
    per_token = find_expert_share(config, shapes)
    share = 1 - (1 - per_token) ** case.rows
    head, in_experts, others = count_weights(config, shapes)
    if config.model_type == "deepseek_v2":
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * config.head_dim
    cached = config.num_hidden_layers * width * context * case.rows
    factors = RANK * sum(map(sum, linears[case.folder].values())) * case.num_adapters if case.num_adapters else 0
    if case.folder == "experts":
        factors *= per_token  # a token uses only some experts of its adapter
    return 2 * (head + share * in_experts + others + cached + factors) / BANDWIDTH * 1e3


def measure_prompts(bench: Bench, config: Any, shapes: Shapes, length: int, num_runs: int) -> tuple[float, float]:
    """Return the tokens per second, and the share of the speed that the GPU's operations allow."""
    seconds = []
    for run in range(num_runs + 1):  # the first run warms up
        prompts = bench.draw_prompts(PROMPTS, length, seed=run)
        start_time = time.perf_counter()
        bench.generate(prompts, 1, [None] * PROMPTS)
        seconds.append(time.perf_counter() - start_time)
    head, in_experts, others = count_weights(config, shapes)
    tokens = PROMPTS * length
    used = in_experts * find_expert_share(config, shapes) + others
    if config.model_type == "deepseek_v2":
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        width = 2 * config.head_dim
    attention = config.num_hidden_layers * config.num_attention_heads * width * PROMPTS * length**2
    operations = 2 * tokens * used + 2 * PROMPTS * head + attention
    value = statistics.median(seconds[1:])
    return tokens / value, operations / FLOPS / value


def main() -> None:
    parser = make_parser(__doc__, has_folder=False)
    parser.add_argument("--layers", type=int, help=f"number of layers (default: {LAYERS})")
    parser.add_argument("--shape", choices=("qwen3", "deepseek"), default="qwen3", help="default: %(default)s")
    add_quantize_flag(parser)
    args = parser.parse_args()
    layers = args.layers or (2 if args.tiny else LAYERS)
    config = make_config(args.shape, args.tiny, layers)
    shapes = list_shapes(config)
    steps, num_runs = (SHORT_STEPS, SHORT_RUNS) if args.tiny else (STEPS, RUNS)
    has_goals = not args.tiny and args.quantize is None and args.shape == "qwen3"
    cases = [case for case in CASES if args.shape == "qwen3" or not case.num_adapters]
    linears, records = list_linears(config) if args.shape == "qwen3" else {}, list[Record]()
    print(f"{describe_device()}, {layers} layers")
    with scratch_folder() as folder:
        write_model(folder / "model", make_tensors(config, shapes), config.to_dict() | {"dtype": "bfloat16"})
        (folder / "adapters").mkdir()
        counts = {case.folder: case.num_adapters for case in sorted(cases, key=lambda case: case.num_adapters)}
        for name in linears:
            count = min(counts[name], 4 if args.tiny else 64)
            for written in write_adapters(folder / name, linears[name], count, RANK):
                (folder / name / written).rename(folder / "adapters" / f"{name}-{written}")
        length = TINY_PROMPT_TOKENS if args.tiny else PROMPT_TOKENS
        settings = {"max_length": MAX_LENGTH + PROMPT_TOKENS, "max_step_tokens": PROMPTS * length}
        settings |= {"quantize": args.quantize} if args.tiny else {"quantize": args.quantize, **MEMORY}
        with LLM(folder / "model", folder / "adapters", max_num_seqs=64, **settings) as llm:
            bench = Bench(llm, StepClock(llm), config, folder)
            speed, share = measure_prompts(bench, config, shapes, length, num_runs)
            print(f"{PROMPTS} prompts of {length} tokens: {speed:.0f} tokens/s, {share:.2f} of the possible speed")
            goal = PROMPT_GOAL if has_goals else None
            records.append(Record("prompts, share of the possible speed", share, "x", f"{speed:.0f} tokens/s", goal))
            for case in cases:
                names = sorted(path.name for path in (folder / "adapters").glob(f"{case.folder}-*"))
                adapters = tuple(Adapter(name) for name in names[: case.num_adapters])
                bench.load(adapters)
                decode = DecodeCase(case.name, case.rows, adapters)
                runs = [measure(bench, decode, steps) for _ in range(num_runs)]
                ms = statistics.median(run.ms for run in runs)
                floor = find_floor_ms(case, config, shapes, linears, PROMPT + steps / 2)
                if args.quantize:
                    print(f"{case.name:20}  {ms:6.2f} ms", flush=True)
                    records.append(Record(case.name, ms, "ms"))
                    continue
                print(f"{case.name:20}  {ms:6.2f} ms  floor {floor:6.2f} ms  {ms / floor:5.2f}", flush=True)
                goal = case.goal if has_goals else None
                records.append(
                    Record(f"{case.name}, over its floor", ms / floor, "x", f"{floor:.2f} ms", goal, at_most=True)
                )
    report(records, args.json)


def make_config(shape: str, is_tiny: bool, layers: int) -> Any:
    from transformers import DeepseekV2Config, Qwen3MoeConfig

    if shape == "qwen3":
        return Qwen3MoeConfig(**TINY if is_tiny else SIZES, num_hidden_layers=layers)
    return DeepseekV2Config(**TINY_DEEPSEEK if is_tiny else DEEPSEEK, num_hidden_layers=layers)


if __name__ == "__main__":
    main()
