"""Adapters, several ranks and mixtures of experts on quantized checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import ConfigError
from lorax_server.files.names import WEIGHTS_FILE
from lorax_server.kernels import BlockMatrix, reference
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.llm import LLM
from lorax_server.models.registry import get_model
from lorax_server.types import StopParams
from tests.lora import make_arena, random_factors, save_adapter
from tests.paged import PagedDriver
from tests.parity.adapters.cases import randomize
from tests.parity.adapters.served import load_adapters
from tests.parity.oracle import oracle_logits
from tests.pooled import VOCAB, save_tokenizer
from tests.quantization.test_formats import PROMPT, TOLERANCE, make_oracle, prefill, serve
from tests.quantization.writer import write_checkpoint
from tests.ranks import RankPool

CPU = torch.device("cpu")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": LINEARS},
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "modules-to-save": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    "name",
    [
        "gptq-asymmetric",
        "gptq-act-order",
        "gptq-act-order-per-matrix",
        "ct-int4-act-order",
        "awq",
        "fp8-blocks",
        "ct-w8a8",
        "nf4-double",
    ],
)
def test_adapter_on_quantized_checkpoint_matches_peft(name: str, adapter: str, tmp_path: Path) -> None:
    """PEFT runs on a model with dequantized weights. The batch contains a sequence without adapter."""
    oracle = make_oracle()
    write_checkpoint(tmp_path / "model", oracle, name)
    plain = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **ADAPTERS[adapter])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied embeddings
        trained = get_peft_model(oracle, config)
        randomize(trained)
        save_adapter(trained, tmp_path / "adapter")
        oracle = make_oracle()
        write_checkpoint(tmp_path / "model", oracle, name)
        adapted = PeftModel.from_pretrained(oracle, tmp_path / "adapter").eval().get_base_model()
    driver = serve(tmp_path / "model", dtype="float32")
    arena = load_adapters(driver.model, [tmp_path / "adapter"], CPU)
    sequences = [driver.add(adapter, len(PROMPT)) for adapter in (1, 0)]
    logits, base = driver.forward([(each, PROMPT) for each in sequences], arena)
    expected = oracle_logits(adapted, PROMPT, len(PROMPT), {})
    assert (expected - plain).abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()  # random adapters amplify rounding
    assert (base - plain).abs().max() < TOLERANCE


def test_completions_with_reordered_inputs_do_not_depend_on_batches_and_updates(tmp_path: Path) -> None:
    """The native kernels and graphs of CPUs apply adapters to the reordered inputs. Updates with the same weights also
    reorder the inputs.
    """
    oracle, folder = make_oracle(vocab_size=VOCAB), tmp_path / "model"
    write_checkpoint(folder, oracle, "gptq-act-order")
    save_tokenizer(folder)
    trained = get_peft_model(oracle, LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTERS["lora"]))
    randomize(trained)
    save_adapter(trained, tmp_path / "adapter")
    prompts, stop = [[5, number] for number in range(6)], StopParams(max_new_tokens=8, ignore_eos=True)
    names = ["tuned", None, "tuned", None, "tuned", "tuned"]
    with LLM(folder, {"tuned": tmp_path / "adapter"}, device="cpu", max_num_seqs=8, cache_bytes=2**22) as llm:
        alone = [llm.generate(prompt, stop=stop, adapter=name)[0] for prompt, name in zip(prompts, names, strict=True)]
        together = llm.generate(prompts, stop=stop, adapter=names)
        llm.update_adapter("tuned", load_file(tmp_path / "adapter" / WEIGHTS_FILE))
        updated = llm.generate(prompts, stop=stop, adapter=names)
    expected = [(each.token_ids, each.logprobs) for each in alone]
    for completions in (together, updated):
        assert [(each.token_ids, each.logprobs) for each in completions] == expected


@pytest.mark.parametrize(
    "model", ["llama-attention-bias", "phi3-window", "gpt2", "neox-parallel", "qwen2-bias", "gemma2-logit-cap"]
)
@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "fp8-blocks", "nf4"])
def test_other_architectures_match_transformers(name: str, model: str, tmp_path: Path) -> None:
    oracle = make_oracle(model)
    write_checkpoint(tmp_path, oracle, name, ignored=("lm_head", "embed_out"))
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path, dtype="float32")) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("model", "name"),
    [("qwen3moe", name) for name in ("gptq", "gptq-act-order", "awq", "nf4")]
    + [("glm4moe", "gptq"), ("deepseek3", "fp8-blocks")],
)
def test_mixture_of_experts_matches_transformers(model: str, name: str, tmp_path: Path) -> None:
    """Published checkpoints store one matrix per expert."""
    oracle = make_oracle(model, moe_intermediate_size=64)
    write_checkpoint(tmp_path, oracle, name)
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path, dtype="float32")) - expected).abs().max() < TOLERANCE


def test_ignored_modules_stay_unquantized(tmp_path: Path) -> None:
    """Layers that fuse quantized and other matrices are converted to floating point."""
    oracle = make_oracle()
    write_checkpoint(tmp_path, oracle, "gptq", ignored=("lm_head", "layers.1", "q_proj"))
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path)) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-act-order-per-matrix"])
def test_fused_matrices_stay_quantized_if_their_inputs_have_the_same_order(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_oracle(), name)
    layer: Any = serve(tmp_path).model.model.layers[0]
    for module in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
        assert isinstance(module.linear.weight, BlockMatrix) == (name == "gptq-act-order")
        assert (module.input_order is not None) == (name == "gptq-act-order")
    assert isinstance(layer.self_attn.o_proj.linear.weight, BlockMatrix)
    assert layer.self_attn.o_proj.input_order is not None


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order"])
def test_quantized_head_matches_transformers(name: str, tmp_path: Path) -> None:
    oracle = make_oracle(vocab_size=128)
    write_checkpoint(tmp_path, oracle, name, ignored=())
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path)) - expected).abs().max() < TOLERANCE


def run_rank(group: ProcessGroup, folder: str, quantize: str | None) -> torch.Tensor:
    """Run a batch of an adapter and the base model, with exact ops."""
    torch.manual_seed(0)
    model = get_model(ModelConfig(Path(folder), dtype="float32", quantize=quantize), group, reference)
    targets = collect_adapter_targets(model)
    arena = make_arena(targets, [(random_factors(targets, 3, 0), 0.5)], CPU)
    driver = PagedDriver(model)
    feeds = [(driver.add(adapter, len(PROMPT)), PROMPT) for adapter in (1, 0)]
    return torch.cat(driver.forward(feeds, arena))


@pytest.mark.parametrize(
    "name", ["gptq-asymmetric", "gptq-act-order", "awq", "fp8-blocks", "ct-int4", "nf4", "rounded"]
)
def test_two_ranks_match_single_rank(name: str, tmp_path: Path, ranks: RankPool) -> None:
    oracle = make_oracle(hidden_size=128)  # two ranks with blocks of 64
    if name == "rounded":
        oracle.save_pretrained(tmp_path)
    else:
        write_checkpoint(tmp_path, oracle, name)
    arguments = str(tmp_path), "bitsandbytes-nf4" if name == "rounded" else None
    alone = run_rank(FakeGroup(), *arguments)
    for logits in ranks.run(2, run_rank, *arguments):
        assert (logits - alone).abs().max() < 1e-5 * alone.abs().max()


def test_only_slices_of_reordered_inputs_are_converted(tmp_path: Path) -> None:
    """The inputs of a row-parallel shard belong to all groups."""
    write_checkpoint(tmp_path, make_oracle(hidden_size=128), "gptq-act-order")
    model: Any = get_model(ModelConfig(tmp_path, dtype="float32"), FakeGroup(0, 2), reference)
    layer = model.model.layers[0]
    assert model.weight_format in ("gptq-int4, float32 from gptq-int4", "float32 from gptq-int4, gptq-int4")
    assert isinstance(layer.mlp.gate_up_proj.linear.weight, BlockMatrix)
    assert isinstance(layer.mlp.down_proj.linear.weight, torch.Tensor)


def test_rounding_with_shards_that_split_blocks_is_rejected(tmp_path: Path) -> None:
    make_oracle(intermediate_size=96).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a shard boundary splits a block of 64 weights; use fewer ranks"):
        get_model(ModelConfig(tmp_path, quantize="bitsandbytes-nf4"), FakeGroup(0, 2))
