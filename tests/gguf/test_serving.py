"""Quantized base models: adapters match PEFT, several ranks match one, and embedding and head share their memory."""

import math
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from peft import LoraConfig, PeftModel, get_peft_model

from lorax_server.config import ModelConfig
from lorax_server.distributed import ProcessGroup
from lorax_server.errors import ConfigError
from lorax_server.gguf.model_folder import find_model_folder
from lorax_server.kernels import BlockMatrix, reference
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.registry import get_model
from lorax_server.worker.memory import find_weight_format, model_bytes
from tests.gguf import writer
from tests.gguf.test_architectures import CASES, EXPERT_SIZES, PROMPT, SIZES, TOLERANCE, make_oracle, prefill, serve
from tests.lora import make_arena, random_factors, save_adapter
from tests.paged import PagedDriver
from tests.parity.adapters.cases import randomize
from tests.parity.adapters.served import load_adapters
from tests.parity.oracle import oracle_logits
from tests.ranks import RankPool

CPU = torch.device("cpu")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": LINEARS},
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "embedding-and-head": {"target_modules": ["embed_tokens", "lm_head", *ATTENTION]},
    "modules-to-save": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 90]},
    "kasa": {"target_modules": ATTENTION, "kasa_config": {}},
}
PLACES = {"tied": "llama-bias", "untied": "llama"}
EXPERTS = {
    "target_modules": [*ATTENTION, "gate"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
K_TYPES = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.Q8_0)
CASES |= {
    "k-types": ("llama-gqa", {"hidden_size": 256, "intermediate_size": 512}),
    "ranks": ("llama-gqa", SIZES | {"intermediate_size": 128}),
    "ranks-experts": ("qwen3moe", EXPERT_SIZES),
    "ranks-fused": ("phi3", SIZES | {"intermediate_size": 128}),
    "ranks-interleaved": ("cohere-head-norm", SIZES | {"intermediate_size": 128}),
}


def k_types(name: str) -> Type:
    return K_TYPES[sum(name.encode()) % len(K_TYPES)]


def make_config(**fields: Any) -> LoraConfig:
    config = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **fields}
    if "kasa_config" in config:
        from peft.tuners.lora.config import KasaConfig

        config["kasa_config"] = KasaConfig()
    return LoraConfig(**config)


@pytest.mark.parametrize("head", PLACES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_on_quantized_model_matches_peft(name: str, head: str, tmp_path: Path) -> None:
    check_adapter(PLACES[head], ADAPTERS[name], tmp_path)


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe"])
def test_adapter_on_experts_of_quantized_model_matches_peft(case: str, tmp_path: Path) -> None:
    check_adapter(case, EXPERTS, tmp_path)


def check_adapter(case: str, config: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_oracle(case)
    writer.write_model(tmp_path / "model.gguf", oracle, writer.mixed_types)
    plain = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied embeddings
        trained = get_peft_model(oracle, make_config(**config))
        randomize(trained)
        save_adapter(trained, tmp_path / "adapter")
        oracle = make_oracle(case)
        writer.write_model(tmp_path / "model.gguf", oracle, writer.mixed_types)
        adapted = PeftModel.from_pretrained(oracle, tmp_path / "adapter").eval().get_base_model()
    driver = serve(tmp_path / "model.gguf")
    arena = load_adapters(driver.model, [tmp_path / "adapter"], CPU)
    sequences = [driver.add(adapter, len(PROMPT)) for adapter in (1, 0)]
    logits, base = driver.forward([(each, PROMPT) for each in sequences], arena)
    expected = oracle_logits(adapted, PROMPT, len(PROMPT), {})
    assert (expected - plain).abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()  # random adapters amplify rounding
    assert (base - plain).abs().max() < TOLERANCE


def test_all_block_formats_can_be_mixed(tmp_path: Path) -> None:
    oracle = make_oracle("k-types")
    writer.write_model(tmp_path / "model.gguf", oracle, k_types)
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    driver = serve(tmp_path / "model.gguf")
    assert set(driver.model.weight_format.split(", ")) == {each.name for each in K_TYPES}
    assert (prefill(driver) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_tied_head_and_embedding_share_memory(tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama-bias"), lambda _: Type.Q8_0)
    model: Any = serve(tmp_path / "model.gguf").model
    assert isinstance(model.lm_head.linear.weight, BlockMatrix)
    assert model.model.embed_tokens.weight is model.lm_head.linear.weight
    targets = collect_adapter_targets(model).values()
    weights = [target.weight for target in targets if target.weight is not None and target.name != "lm_head"]
    count = sum(math.prod(weight.shape) for weight in weights)
    assert find_weight_format(model) == "Q8_0"
    assert count < model_bytes(model) < 1.3 * count


def run_rank(group: ProcessGroup, folder: str) -> torch.Tensor:
    """Run a batch of an adapter and the base model."""
    torch.manual_seed(0)
    model = get_model(ModelConfig(Path(folder)), group)
    targets = collect_adapter_targets(model)
    arena = make_arena(targets, [(random_factors(targets, 3, 0), 0.5)], CPU)
    driver = PagedDriver(model)
    feeds = [(driver.add(adapter, len(PROMPT)), PROMPT) for adapter in (1, 0)]
    return torch.cat(driver.forward(feeds, arena))


@pytest.mark.parametrize("case", ["ranks", "ranks-experts", "ranks-fused", "ranks-interleaved"])
def test_two_ranks_match_single_rank(case: str, tmp_path: Path, ranks: RankPool) -> None:
    from lorax_server.distributed import FakeGroup

    writer.write_model(tmp_path / "model.gguf", make_oracle(case), writer.mixed_types)
    folder = str(find_model_folder(tmp_path / "model.gguf"))
    alone = run_rank(FakeGroup(), folder)
    for logits in ranks.run(2, run_rank, folder):
        assert (logits - alone).abs().max() < 1e-5 * alone.abs().max()


def test_tensor_parallel_size_that_splits_blocks_is_rejected(tmp_path: Path) -> None:
    from lorax_server.distributed import FakeGroup

    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), lambda _: Type.Q8_0)
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.down_proj.weight' cannot be split over several ranks"):
        get_model(ModelConfig(find_model_folder(tmp_path / "model.gguf")), FakeGroup(0, 2))


# --- Quantization while loading ---


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "llama-bias", "gpt2", "phi3", "glm4"])
def test_float_checkpoint_is_quantized_while_loading(quantize: str, case: str, tmp_path: Path) -> None:
    oracle = make_oracle(case)
    oracle.save_pretrained(tmp_path)
    model = get_model(ModelConfig(tmp_path, quantize=quantize), ops=reference)
    expected = {"int8"} if quantize == "int8" else {"int4", "int8"}
    assert set(model.weight_format.split(", ")) == expected
    quantize_oracle(oracle, quantize)
    logits = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(PagedDriver(model)) - logits).abs().max() < 1e-5 * logits.abs().max()


@torch.no_grad()
def quantize_oracle(oracle: Any, quantize: str) -> None:
    """Quantize as the types Q8_0 and Q4_0 do. Embedding and head have at least 8 bits."""
    for name, parameter in oracle.named_parameters():
        if parameter.dim() < 2 or "wpe" in name or "norm" in name:
            continue
        is_vocabulary = any(each in name for each in ("embed_tokens", "lm_head", "wte"))
        kind = Type.Q8_0 if quantize == "int8" or is_vocabulary else Type.Q4_0
        is_transposed = writer.is_transposed(oracle.config, name)
        matrix = (parameter.t() if is_transposed else parameter).numpy()
        rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind))
        parameter.copy_(rounded.t() if is_transposed else rounded)


def test_matrices_with_partial_blocks_stay_unquantized(tmp_path: Path) -> None:
    CASES["partial"] = ("llama-gqa", {"hidden_size": 64, "intermediate_size": 48})
    make_oracle("partial").save_pretrained(tmp_path)
    model: Any = get_model(ModelConfig(tmp_path, quantize="int8"), ops=reference)
    layer = model.model.layers[0]
    assert not isinstance(layer.mlp.down_proj.linear.weight, BlockMatrix)
    assert isinstance(layer.mlp.gate_up_proj.linear.weight, BlockMatrix)


def test_float_matrices_in_gguf_files_are_quantized_while_loading(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    writer.write_model(tmp_path / "model.gguf", oracle, lambda _: Type.F16)
    settings = ModelConfig(find_model_folder(tmp_path / "model.gguf"), quantize="int8")
    driver = PagedDriver(get_model(settings, ops=reference))
    assert driver.model.weight_format == "int8"
    quantize_oracle(oracle, "int8")
    logits = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver) - logits).abs().max() < 1e-5 * logits.abs().max()


def test_quantized_matrices_are_not_quantized_again(tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), lambda _: Type.Q8_0)
    with pytest.raises(ConfigError, match=r"cannot be quantized to int4: tensor .* is stored as Q8_0"):
        get_model(ModelConfig(find_model_folder(tmp_path / "model.gguf"), quantize="int4"))
