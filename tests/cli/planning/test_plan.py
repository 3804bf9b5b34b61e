"""`lorax plan`: figures, errors, and sizes compared with real models and adapters."""

import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lorax_server.adapters.target import TargetKind
from lorax_server.cli import main
from lorax_server.cli.planning.command import LIMIT_REASONS
from lorax_server.cli.planning.model_sizes import HALF_PRECISION_BYTES, ModelSizes, read_sizes
from lorax_server.cli.planning.step_time import GPUS, find_gpu
from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.model_types import MODEL_CLASSES
from lorax_server.models.registry import DEFAULT_MAX_POSITIONS, build_model
from lorax_server.weights import estimate_bytes
from tests.cli.planning.test_measured import LLAMA_8B
from tests.models.tiny import GPT2, LLAMA, NO_GQA, make_model
from tests.parity.other_variants import OTHER_VARIANTS
from tests.parity.variants import checkpoint, make_oracle, make_weights

DEMO = Path(__file__).parents[3] / "lorax_server/demo/model"
FALCON_7B = {  # as on the hub, without fields that do not affect sizes
    "alibi": False,
    "bias": False,
    "hidden_size": 4544,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
UNUSABLE = "config.json: cannot be used as a model config"
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-biased": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=16, attention_bias=True),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-inner": lambda: transformers.GPT2Config(**GPT2, n_inner=40),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NO_GQA),
    "gpt_neox-unbiased": lambda: transformers.GPTNeoXConfig(**NO_GQA, attention_bias=False),
    "opt": lambda: transformers.OPTConfig(**NO_GQA, ffn_dim=48, word_embed_proj_dim=32),
    "opt-projected": lambda: transformers.OPTConfig(
        **NO_GQA, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "model")


def plan(*argv: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["plan", *argv, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def expect_error(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


# --- Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_bytes_match_transformers(name: str) -> None:
    config = CONFIGS[name]()
    real = make_model(config)
    assert ModelSizes(config).weight_bytes == HALF_PRECISION_BYTES * sum(
        parameter.numel() for parameter in real.parameters()
    )


def test_size_tests_cover_all_architectures() -> None:
    compared = {config().model_type for config in CONFIGS.values()}
    compared |= {variant.config().model_type for variant in OTHER_VARIANTS.values()}
    assert compared == set(MODEL_CLASSES)


@pytest.mark.parametrize("name", OTHER_VARIANTS)
def test_planned_memory_matches_served_model(name: str) -> None:
    oracle, config, rank = make_oracle(name), OTHER_VARIANTS[name].config(), 8
    counted = ModelSizes(config)
    assert counted.weight_bytes == HALF_PRECISION_BYTES * sum(
        tensor.numel() for tensor in checkpoint(name, oracle).values()
    )
    model = build_model(config, make_weights(checkpoint(name, oracle), torch.device("cpu")))
    cached = sum(tensor[0].nbytes for tensor in {*itertools.chain(*model.allocate_kv_cache(1, 1))})  # float32
    assert counted.token_bytes == HALF_PRECISION_BYTES * cached // torch.float32.itemsize
    kinds = (TargetKind.LINEAR, TargetKind.EXPERTS)
    targets = [target for target in collect_adapter_targets(model).values() if target.kind in kinds]
    counts = [1 if target.experts is None else target.experts.num_experts for target in targets]
    pairs = zip(targets, counts, strict=True)
    sizes = [count * rank * size for target, count in pairs for size in (target.inputs.full, target.outputs.full)]
    modules = {target.name.rpartition(".")[2] for target in targets}
    assert {matrix.name for matrix in counted.matrices} == modules
    assert counted.adapter_bytes(rank, modules) == 256 * sum(-(-HALF_PRECISION_BYTES * size // 256) for size in sizes)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", DEFAULT_MAX_POSITIONS)
    assert counted.max_length == limit


def test_decode_step_reads_only_routed_experts() -> None:
    sizes = ModelSizes(OTHER_VARIANTS["qwen3moe"].config())
    expert = sum(
        HALF_PRECISION_BYTES * matrix.outputs * matrix.inputs for matrix in sizes.matrices if matrix.num_experts > 1
    )
    step = sizes.count_bytes_read(1)
    assert sizes.count_bytes_read(1000) == pytest.approx(step + 3 * expert)  # 6 experts, 3 per token
    assert sizes.count_bytes_read(2) == pytest.approx(step + 1.5 * expert)
    dense = sizes.prompt_flops(0) - 2 * 3 * expert // HALF_PRECISION_BYTES
    assert dense == 2 * sum(matrix.outputs * matrix.inputs for matrix in sizes.matrices if matrix.num_experts == 1)


def test_falcon_with_alibi_is_rejected() -> None:
    with pytest.raises(ConfigError, match="alibi"):
        ModelSizes(transformers.FalconConfig(alibi=True))


def test_parameter_counts_match_hub_models(tmp_path: Path) -> None:
    """BLOOM's config uses names that transformers no longer writes."""
    bloom = {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "num_attention_heads": 32, "vocab_size": 250880}
    for config, parameters in ((bloom, 7_069_016_064), (FALCON_7B, 6_921_720_704)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_sizes(tmp_path).weight_bytes == 2 * parameters


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "opt"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapter_bytes_match_peft(name: str, use_dora: bool) -> None:
    config = CONFIGS[name]()
    counted = ModelSizes(config)
    modules = sorted({matrix.name for matrix in counted.matrices})
    settings = LoraConfig(
        r=8, target_modules=modules, task_type="CAUSAL_LM", use_dora=use_dora, fan_in_fan_out=name == "gpt2"
    )
    adapted = get_peft_model(make_model(config), settings)
    tensors = [tensor for key, tensor in adapted.named_parameters() if "lora_" in key]
    units = sum(-(-2 * tensor.numel() // 256) for tensor in tensors)
    assert counted.adapter_bytes(8, modules, use_dora) == 256 * units


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_plan_report_and_json_agree(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    argv = ["--model", model, "--gpu", "H200", "--adapters", "1000", "--requests-per-s", "50", "--json", str(file)]
    assert main(["plan", *argv]) == 0
    output = capsys.readouterr().out
    figures = json.loads(file.read_text())
    for words in (
        "weights 16.1 GB",
        "1,000 of 83.9 MB",
        "batches of 256 sequences",
        "times the memory bandwidth limit",
        "replicas",
    ):
        assert words in output
    assert figures["replicas"] == 2
    assert figures["memory"]["adapters"] == pytest.approx(30e9, rel=0.01)  # docs/engine.md, "Start and memory"
    parts = figures["memory"]
    used = sum(parts[name] for name in ("weights", "adapters", "steps", "cache")) + parts["adapters"] // 64
    assert used == pytest.approx(0.9 * parts["total"], rel=1e-6)
    assert parts["cache_tokens"] * 131072 == pytest.approx(parts["cache"], rel=1e-3)


def test_model_sizes_can_be_set_by_flags(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 32 --hidden-size 4096 --intermediate-size 14336 --heads 32 --kv-heads 8 --vocab-size 128256"
    gpu = "--gpu-memory 143771M --gpu-bandwidth 4800 --gpu-tflops 989"
    by_flags = plan(*sizes.split(), *gpu.split(), "--adapters", "9", capsys=capsys)
    by_name = plan("--model", f"{model}/config.json", "--gpu", "h200", "--adapters", "9", capsys=capsys)
    assert by_flags["gpu"].pop("name") != by_name["gpu"].pop("name")
    assert by_flags == by_name


def test_adapter_bytes_of_mixed_ranks_add_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = plan("--model", model, "--gpu", "H100", "--ranks", "8:700,16:200,64:100", capsys=capsys)["adapters"]
    one = plan("--model", model, "--gpu", "H100", "--adapters", "1", "--rank", "8", capsys=capsys)["adapters"]
    assert mixed["count"] == 1000
    assert mixed["bytes"] == one["bytes"] * (700 + 2 * 200 + 8 * 100)
    few = plan("--model", model, "--gpu", "H100", "--adapters", "1", "--modules", "q_proj, v_proj", capsys=capsys)
    assert few["adapters"]["bytes"] < one["bytes"]


@pytest.mark.parametrize(
    ("limit", "flags"),
    [
        ("batch_size", "--gpu H200"),
        ("latency", "--gpu H200 --inter-token-latency-ms 12 --prompt-tokens 64"),
        ("cache", "--gpu L4"),
        ("adapters", "--gpu H200 --adapters 500 --adapter-bytes 2G --zipf 0"),
        (
            "copies",
            "--gpu H200 --adapters 9000 --rank 512 --zipf 0 --completion-tokens 1 --prompt-tokens 1 --max-num-seqs 8",
        ),
        ("api", "--gpu B200 --completion-tokens 900 --prompt-tokens 1 --max-num-seqs 1024"),
    ],
)
def test_plan_reports_limiting_factor(limit: str, flags: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    replica = plan("--model", model, *flags.split(), capsys=capsys)["replica"]
    assert replica["limit"] == limit
    assert limit in LIMIT_REASONS


def test_deprecated_flag_names_are_accepted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    new = "--max-num-seqs 8 --completion-tokens 20 --max-utilization 0.5 --inter-token-latency-ms 30"
    old = "--max-rows 8 --answer-tokens 20 --load 0.5 --token-ms 30"
    expected, plain = (plan("--model", model, "--gpu", "H100", *flags.split(), capsys=capsys) for flags in (new, ""))
    assert plan("--model", model, "--gpu", "H100", *old.split(), capsys=capsys) == expected != plain


def test_plan_reports_prefill_bound_replica(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    replica = plan(
        "--model", model, "--gpu", "A10", "--prompt-tokens", "4000", "--completion-tokens", "10", capsys=capsys
    )["replica"]
    assert replica["is_busy_with_prompts"]
    assert 0.5 < replica["prompt_share"] <= 1


def test_more_traffic_needs_more_replicas(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def count(*more: str) -> int:
        result = plan("--model", model, "--gpu", "H100", "--adapters", "100", *more, capsys=capsys)["replicas"]
        assert isinstance(result, int)
        return result

    assert count("--requests-per-s", "1") == 1
    assert count("--requests-per-s", "400") > count("--requests-per-s", "200") > 3
    assert count("--requests-per-s", "400", "--max-utilization", "0.5") > count("--requests-per-s", "400")
    assert count("--requests-per-s", "400", "--inter-token-latency-ms", "15") > count("--requests-per-s", "400")
    assert count("--requests-per-s", "1000000000") > 10**6


def test_float8_cache_holds_twice_as_many_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = plan("--model", model, "--gpu", "L4", capsys=capsys)
    float8 = plan("--model", model, "--gpu", "L4", "--quantize", "fp8-kv", capsys=capsys)
    assert float8["memory"]["cache_tokens"] == pytest.approx(2 * plain["memory"]["cache_tokens"], rel=0.01)
    assert float8["replica"]["batch_size"] > plain["replica"]["batch_size"]


def test_quantized_checkpoint_needs_less_memory(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = LLAMA_8B | {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = plan("--model", model, "--gpu", "L4", capsys=capsys)
    quantized = plan("--model", str(tmp_path), "--gpu", "L4", capsys=capsys)
    assert quantized["memory"]["weights"] == pytest.approx(6.03e9, rel=0.01)  # 2.1e9 for the embedding and the head
    assert quantized["replica"]["floor_ms"] < 0.6 * plain["replica"]["floor_ms"]  # includes the KV cache
    stored["desc_act"] = True  # the config does not show whether these weights stay quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    converted = plan("--model", str(tmp_path), "--gpu", "L4", capsys=capsys)
    assert converted["memory"]["weights"] == plain["memory"]["weights"]
    assert main(["plan", "--model", str(tmp_path), "--gpu", "L4"]) == 0
    assert "step times assume that kernels for quantized weights" in capsys.readouterr().out


@pytest.mark.parametrize("quantize", ["int8", "eetq", "hqq-4bit", "fp8", "fp8-dynamic", "bitsandbytes-nf4", "fp8-kv"])
def test_weights_quantized_while_loading_match_server(quantize: str, tmp_path: Path) -> None:
    make_model(transformers.LlamaConfig(**LLAMA | {"hidden_size": 64, "intermediate_size": 128})).save_pretrained(
        tmp_path
    )
    settings, device = ModelConfig(tmp_path, quantize=quantize), torch.device("cuda")
    expected = estimate_bytes(tmp_path, torch.bfloat16, device, settings.loaded_format)
    assert read_sizes(tmp_path, quantize).weight_bytes == expected
    plain = read_sizes(tmp_path)
    assert (expected < plain.weight_bytes) == (quantize != "fp8-kv")
    assert read_sizes(tmp_path, quantize).token_bytes == plain.token_bytes


def test_plan_with_quantized_weights(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, int4, nf4 = (
        plan("--model", model, "--gpu", "L4", *flags, capsys=capsys)
        for flags in ((), ("--quantize", "hqq-4bit"), ("--quantize", "bitsandbytes-nf4"))
    )
    vocabulary, linear = 2 * 128256 * 4096, 6979321856
    assert int4["memory"]["weights"] == pytest.approx(0.625 * linear + 1.125 * vocabulary, rel=0.001)
    assert nf4["memory"]["weights"] == pytest.approx(0.5625 * linear + 2 * vocabulary, rel=0.001)
    assert int4["has_quantized_weights"]
    assert int4["replica"]["floor_ms"] < plain["replica"]["floor_ms"]
    # The KV cache stays in half precision.
    ratios = [figures["memory"]["cache"] / figures["memory"]["cache_tokens"] for figures in (plain, nf4)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.01)


def test_plan_rejects_unfit_quantize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": stored}))
    message = expect_error("--model", str(tmp_path), "--gpu", "L4", "--quantize", "int8", capsys=capsys)
    assert "already stored as gptq" in message


def test_documented_example_matches_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DEMO.parents[2] / "docs/capacity.md").read_text()
    command, shown = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("sh", "text"))
    assert command is not None
    assert shown is not None
    assert main(shlex.split(command[1].replace("\\\n", ""))[1:]) == 0
    assert capsys.readouterr().out == shown[1]


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--gpu"),
        ("--gpu H220", "H200"),
        ("--gpu toaster", "--gpu-memory, --gpu-bandwidth and --gpu-tflops"),
        ("--gpu-memory 80G", "--gpu-bandwidth"),
        ("--gpu H200 --adapters -1", "--adapters = -1 must not be negative"),
        ("--gpu H200 --adapters 1e99", "--adapters"),
        ("--gpu H200 --adapters " + "9" * 5000, "--adapters"),
        ("--gpu H200 --requests-per-s -1", "--requests-per-s = -1.0 must be above 0"),
        ("--gpu H200 --requests-per-s nan", "--requests-per-s"),
        ("--gpu H200 --zipf inf", "--zipf"),
        ("--gpu H200 --max-utilization 1.5", "--max-utilization = 1.5 must be at most 1"),
        ("--gpu H200 --prompt-tokens 0", "--prompt-tokens"),
        ("--gpu H200 --prompt-tokens 200000", "the model supports at most 131072"),
        ("--gpu H200 --rank 513", "--rank = 513 must be at most 512"),
        ("--gpu H200 --ranks 8", "must have the form 8:700,64:100"),
        ("--gpu H200 --ranks 8:1,x:2", "must have the form 8:700,64:100"),
        ("--gpu H200 --ranks 8:1000000,16:1", "more than 1000000 adapters"),
        ("--gpu H200 --ranks 8:1 --rank 8", "not both"),
        ("--gpu H200 --modules q_proj,c_attn", "the model has no module 'c_attn'; its modules are q_proj"),
        ("--gpu H200 --inter-token-latency-ms 1", "a single sequence takes"),
        ("--gpu H200 --gpu-memory 16G", "the model does not fit"),
        ("--gpu H200 --gpu-bandwidth 1e300", "--gpu-bandwidth = 1e+300 must be at most 1000000"),
        ("--gpu H200 --gpu-memory 99999999999T", "must be at most 1152921504606846976"),
        ("--gpu L4 --adapter-bytes 30G", "lower --adapter-bytes"),
        ("--gpu H200 --adapters 5 --adapter-bytes 1M", "raise --adapter-bytes"),
        ("--gpu H200 --layers 3", "omit --layers"),
        ("--gpu H200 --adapter 3", "did you mean --adapter"),
        ("--gpu H200 --json /nowhere/plan.json", "cannot be written"),
    ],
)
def test_invalid_flags_are_rejected(flags: str, words: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--model", model, *flags.split()])
    assert code == 2
    output = capsys.readouterr().err
    assert words in output
    assert len(output) < 600


def test_incomplete_model_sizes_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hidden-size" in expect_error("--layers", "3", "--gpu", "H200", capsys=capsys)
    assert "--model" in expect_error("--gpu", "H200", capsys=capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", UNUSABLE),
        (b"[]", UNUSABLE),
        (b"\xff\xfe", UNUSABLE),
        (b"[" * 5000, UNUSABLE),
        (b"{}", UNUSABLE),
        (b'{"model_type": ["llama"]}', "is not supported"),
        (b'{"model_type": "mamba"}', "use one of arcee, bloom, cohere"),
        (
            json.dumps(LLAMA_8B | {"num_hidden_layers": -3}).encode(),
            "num_hidden_layers must be a positive integer (got -3)",
        ),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": 2.5}).encode(), "num_hidden_layers"),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": True}).encode(), "num_hidden_layers"),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": 10**6}).encode(), "num_hidden_layers must be at most 1000"),
        (json.dumps(LLAMA_8B | {"vocab_size": 10**40}).encode(), "sizes are too large"),
        (json.dumps(LLAMA_8B | {"num_attention_heads": 3}).encode(), "is not a multiple"),
        (
            json.dumps(LLAMA_8B | {"quantization_config": {"bits": 4}}).encode(),
            "the quantization method None is not supported",
        ),
    ],
)
def test_invalid_model_configs_are_rejected(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    output = expect_error("--model", str(tmp_path), "--gpu", "H200", capsys=capsys)
    assert words in output
    assert len(output) < 600


def test_missing_model_folder_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "lorax download" in expect_error("--model", "owner/name", "--gpu", "H200", capsys=capsys)
    assert "lorax download" in expect_error("--model", str(tmp_path), "--gpu", "H200", capsys=capsys)


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", "nvidia-h200"])
def test_gpu_lookup_ignores_spelling_but_not_memory_size(name: str) -> None:
    assert find_gpu(name) is GPUS["H200"]
    with pytest.raises(ConfigError, match="A100-80GB"):
        find_gpu("A100")
