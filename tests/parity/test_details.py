"""Behavior of single architectures beyond logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.errors import ConfigError, InputError
from lorax_server.kernels import select_ops
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM, FlashLlamaLayer
from lorax_server.models.registry import build_model, get_model
from lorax_server.weights import Weights
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits
from tests.parity.variant import GQA, rope
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

CPU = torch.device("cpu")
IDS = [5, 9, 33, 60, 7, 7, 81, 12, 3, 44, 90, 96]


def make(name: str, device: torch.device) -> tuple[Any, Any]:
    oracle = make_oracle(name).to(device)
    return oracle, build_model(VARIANTS[name].config(), make_weights(checkpoint(name, oracle), device))


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "neox-parallel", "opt-projection"])
def test_lm_head_indices_and_skip_lm_head_select_outputs(name: str, device: torch.device) -> None:
    _, model = make(name, device)
    driver = PagedDriver(model)
    inputs = driver.inputs([(driver.add(), IDS), (driver.add(), IDS[:5])])
    rows = torch.tensor([16, 11, 0], device=device)
    with torch.no_grad():
        everything, speculative = model(**inputs)
        assert speculative is None
        assert torch.allclose(model(**inputs, lm_head_indices=rows)[0], everything[rows], atol=1e-5)
        hidden, speculative = model(**inputs, lm_head_indices=rows, skip_lm_head=True)
        assert speculative is None
        assert hidden.shape == (3, model.lm_head.linear.weight.shape[1])
        assert torch.allclose(model.lm_head(hidden)[0], everything[rows], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "opt-pre-norm"])
def test_positions_past_limit_are_rejected(name: str, device: torch.device) -> None:
    _, model = make(name, device)
    driver = PagedDriver(model)
    seq = driver.add()
    driver.forward([(seq, [5] * 128)])
    with pytest.raises(InputError, match="at most 128 for this model"):
        driver.forward([(seq, [5])])


def test_prefill_cache_indices_keep_only_a_window(device: torch.device) -> None:
    """Keys and values outside the window of later tokens are not stored, and the content of their slots is ignored."""
    oracle, model = make("mistral-window", device)
    expected = oracle_logits(oracle, [*IDS, 17, 18, 19], len(IDS), {})
    driver = PagedDriver(model)
    seq = driver.add()
    for keys, values in driver.kv_cache:
        keys.fill_(1e4)
        values.fill_(1e4)
    kept = torch.arange(len(IDS) - 5, len(IDS), device=device)  # a window of 6 covers the token and 5 tokens before it
    prefill = driver.forward([(seq, IDS)], prefill_cache_indices=kept)[0]
    decode = [driver.forward([(seq, [token])])[0] for token in (17, 18, 19)]
    assert (torch.cat([prefill, *decode]) - expected).abs().max() < 1e-4
    for keys, _ in driver.kv_cache:
        first = keys[:, 0, :, 0]
        assert int(((first != 1e4) & (first != 0)).sum()) == 5 + 3  # a block is cleared when it is first written


def test_slot_minus_one_is_not_written(device: torch.device) -> None:
    """Padding rows do not change the cache, including its last slot."""
    _, model = make("llama-gqa", device)
    driver = PagedDriver(model)
    inputs = driver.inputs([(driver.add(), IDS)])
    inputs["slots"][-4:] = -1
    with torch.no_grad():
        model(**inputs)
    for keys, values in driver.kv_cache:
        assert int((keys[:, 0, :, 0] != 0).sum()) == int((values[:, 0, :, 0] != 0).sum()) == len(IDS) - 4


def test_create_layer_fn_builds_custom_layers(device: torch.device) -> None:
    """Build layers with a custom function, which replaces the second of three layers by a no-op."""
    oracle, _ = make("llama-gqa", device)
    made = []

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor, residual: Any, rope: Any, ctx: Any) -> Any:
            assert ctx.cross_attention_states is states
            return torch.zeros_like(x), x if residual is None else x + residual

    def create(layer_id: int, prefix: str, config: Any, weights: Any) -> nn.Module:
        made.append((layer_id, prefix))
        return Nothing() if layer_id == 1 else FlashLlamaLayer(layer_id, prefix, config, weights)

    states = torch.zeros(1, device=device)
    weights = make_weights(checkpoint("llama-gqa", oracle), device)
    with torch.no_grad():
        model = FlashLlamaForCausalLM("", VARIANTS["llama-gqa"].config(), weights, create_layer_fn=create)
    assert made == [(layer, f"model.layers.{layer}") for layer in range(3)]
    driver = PagedDriver(model)
    logits = driver.forward([(driver.add(), IDS)], cross_attention_states=states)[0]
    del oracle.model.layers[1]
    oracle.model.layers[1].self_attn.layer_idx = 1
    oracle.config.num_hidden_layers = 2
    with torch.no_grad():
        assert (logits - oracle(torch.tensor([IDS], device=device)).logits[0]).abs().max() < 1e-4


def test_tensor_name_prefix_is_applied(device: torch.device) -> None:
    """Load a language model inside a larger model, with prefixed tensor names."""
    oracle, model = make("llama-gqa", device)
    tensors = {f"language_model.{name}": tensor for name, tensor in checkpoint("llama-gqa", oracle).items()}
    with torch.no_grad():
        inner = FlashLlamaForCausalLM("language_model", VARIANTS["llama-gqa"].config(), make_weights(tensors, device))
    drivers = PagedDriver(model), PagedDriver(inner)
    first, second = (driver.forward([(driver.add(), IDS)])[0] for driver in drivers)
    assert torch.equal(first, second)


def test_gpt2_scores_are_float32_in_half_precision(device: torch.device) -> None:
    """`reorder_and_upcast_attn` computes scores in float32, so a constant above the float16 range has no effect."""
    tensors = {name: tensor.clone() for name, tensor in checkpoint("gpt2", make_oracle("gpt2")).items()}
    for layer in range(3):
        weight, bias = (tensors[f"transformer.h.{layer}.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
        for column in range(0, 64, 8):  # the first dimension of each head of query and key
            weight[:, column], bias[column] = 0, 450.0
    reference, half = (
        build_model(
            VARIANTS["gpt2-reorder-and-upcast"].config(),
            Weights(tensors, device=device, dtype=dtype, process_group=FakeGroup(), ops=select_ops(device)),
        )
        for dtype in (torch.float32, torch.float16)
    )
    got = []
    for model in (reference, half):
        driver = PagedDriver(model)
        seq = driver.add()
        got.append(torch.cat([driver.forward([(seq, IDS)])[0], driver.forward([(seq, [17])])[0]]).float())
    assert torch.finfo(torch.float16).max < 450.0**2 * 8**-0.5
    assert (got[0] - got[1]).abs().max() < 0.2
    assert (got[0] - got[1]).abs().mean() < 0.02


@pytest.mark.parametrize("name", ["llama-tied-head", "gpt2", "neox-tied-head", "opt-pre-norm"])
def test_separate_head_is_used_despite_tied_config(name: str, tmp_path: Path, device: torch.device) -> None:
    """transformers uses the head in a fine-tuned checkpoint even if the config says that weights are tied."""
    oracle = make_oracle(name)
    assert oracle.config.tie_word_embeddings
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn_like(oracle.get_input_embeddings().weight)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    model = get_model(ModelConfig(tmp_path, dtype="float32", device=device.type))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = theirs.to(device)
    driver = PagedDriver(model)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS], device=device)).logits[0]
    assert (driver.forward([(driver.add(), IDS)])[0] - expected).abs().max() < 1e-4


def test_tied_weights_may_be_stored_as_head_only(device: torch.device) -> None:
    oracle, model = make("llama-tied-head", device)
    tensors = checkpoint("llama-tied-head", oracle)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    other = build_model(VARIANTS["llama-tied-head"].config(), make_weights(tensors, device))
    drivers = PagedDriver(model), PagedDriver(other)
    first, second = (driver.forward([(driver.add(), IDS)])[0] for driver in drivers)
    assert torch.equal(first, second)


def test_tied_head_shares_memory(device: torch.device) -> None:
    _, model = make("llama-tied-head", device)
    assert model.lm_head.linear.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["neox-parallel", "neox-tied-head"])
def test_neox_checkpoint_with_embed_out_loads(name: str, tmp_path: Path, device: torch.device) -> None:
    """Saved checkpoints call the head `embed_out`; adapters, like transformers, call it `lm_head`."""
    oracle = make_oracle(name).to(device)
    oracle.save_pretrained(tmp_path)
    model = get_model(ModelConfig(tmp_path, dtype="float32", device=device.type))
    driver = PagedDriver(model)
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS], device=device)).logits[0]
    assert (driver.forward([(driver.add(), IDS)])[0] - expected).abs().max() < 1e-4
    assert "lm_head" in collect_adapter_targets(model)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.5.w3.weight"),
        ("qwen3moe", "model.layers.0.mlp.experts.5.up_proj.weight"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight"),
        ("glm4moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("deepseek2", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("deepseek2-lite", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("deepseek3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4lite", "model.layers.1.mlp.experts.5.down_proj.weight"),
    ],
)
def test_published_moe_checkpoints_load(name: str, stored: str, tmp_path: Path, device: torch.device) -> None:
    """transformers saves the names of published checkpoints, which differ from the names of its parameters."""
    oracle = make_oracle(name).to(device)
    oracle.save_pretrained(tmp_path, max_shard_size="30KB")
    assert stored in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    model = get_model(ModelConfig(tmp_path, dtype="float32", device=device.type))
    driver = PagedDriver(model)
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS], device=device)).logits[0]
    assert (driver.forward([(driver.add(), IDS)])[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_experts_are_independent_of_checkpoint_layout(bits: int, tmp_path: Path) -> None:
    name, settings = "qwen3moe", {"moe_intermediate_size": 32}
    config = VARIANTS[name].config_class(**VARIANTS[name].settings | settings)
    torch.manual_seed(0)
    oracle: Any = AutoModelForCausalLM.from_config(config).eval()
    oracle.save_pretrained(tmp_path)
    logits = []
    for tensors in (dict(oracle.state_dict()), load_file(tmp_path / "model.safetensors")):
        placement: Any = {"device": CPU, "dtype": torch.float32, "process_group": FakeGroup(), "ops": select_ops(CPU)}
        model = build_model(config, Weights(tensors, **placement, quantize_bits=bits))
        driver = PagedDriver(model)
        logits.append(driver.forward([(driver.add(), IDS)])[0])
    assert torch.equal(*logits)
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS])).logits[0]
    assert 1e-4 < (logits[0] - expected).abs().max() < 0.3 * expected.abs().max()


def test_indivisible_experts_are_rejected() -> None:
    weights = make_weights(checkpoint("qwen3moe", make_oracle("qwen3moe")), torch.device("cpu"), FakeGroup(0, 4))
    config = VARIANTS["qwen3moe"].config()
    config.moe_intermediate_size = 26
    with pytest.raises(ConfigError, match="moe_intermediate_size = 26 is not divisible by 4 tensor-parallel ranks"):
        build_model(config, weights)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mistral-window", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2-bias", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3-head-norm", {"mlp_bias": True}),
        ("glm4", {"mlp_bias": True}),
        ("mixtral", {"attention_bias": True, "mlp_bias": True, "moe_intermediate_size": 7}),
        ("qwen3moe", {"mlp_bias": True, "shared_expert_intermediate_size": 7}),
        ("neox-parallel", {"partial_rotary_factor": 0.75}),  # the value in rope_parameters takes precedence
    ],
)
def test_fields_of_other_architectures_are_ignored(name: str, fields: dict[str, Any], device: torch.device) -> None:
    oracle, model = make(name, device)
    config = VARIANTS[name].config()
    for field, value in fields.items():
        setattr(config, field, value)
    other = build_model(config, make_weights(checkpoint(name, oracle), device))
    drivers = PagedDriver(model), PagedDriver(other)
    first, second = (driver.forward([(driver.add(), IDS)])[0] for driver in drivers)
    assert torch.equal(first, second)


MPT_FIELDS = ("clip_qkv", "qk_ln", "prefix_lm")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gpt2", {"activation_function": "prelu"}, "activation_function = 'prelu' .* learned"),
        ("llama-gqa", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor is not supported"),
        ("llama-gqa", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "settings per layer type"),
        ("qwen2-window", {"layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention'"),
        ("qwen2-window", {"sliding_window": None}, "sliding_window = None"),
        ("neox-parallel", {"rope_theta": 77.0}, "rope_theta = 77.0 contradicts 10000"),
        *[("mpt", {"attn_config": {field: True}}, f"attn_config.{field} is not") for field in MPT_FIELDS],
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi = false"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
        ("mpt", {"no_bias": False}, "no_bias = false"),
        ("qwen3moe", {"num_experts_per_tok": 7}, "must be between 1 and the number of experts, 6"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported; use 'greedy' or"),
        ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ("deepseek2", {"quantize": "fp8-kv"}, "fp8-kv is not supported for deepseek_v2"),
        ("deepseek3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; use 'sigmoid'"),
        ("deepseek3", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported; use 4"),
    ],
)
def test_unsupported_values_are_rejected(name: str, fields: dict[str, Any], message: str) -> None:
    cpu = torch.device("cpu")
    config = VARIANTS[name].config()
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(ConfigError, match=message):
        build_model(config, make_weights(checkpoint(name, make_oracle(name)), cpu))


def test_llama_config_accepts_legacy_rope_fields() -> None:
    old: dict[str, Any] = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config: Any = LlamaConfig(**GQA, **old)
    assert config.num_key_value_heads == 2
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.rope_parameters["factor"] == 2.0
