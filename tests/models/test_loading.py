"""Loading `CausalLM`: files, configs, tokenizers and rejected models."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorax_server.errors import ConfigError, InputError, UnsupportedModelError, WeightsError
from lorax_server.models.causal_lm import CausalLM
from lorax_server.models.pretrained import eos_token_ids, max_positions, resolve_pad_token
from tests.models.driving import request, run
from tests.models.tiny import STATEFUL, UNFIT, VOCAB, Zoo, change_json, make_tokenizer

Variant = Callable[..., Path]
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")


@pytest.fixture
def variant(zoo: Zoo, tmp_path: Path) -> Variant:
    """Return a function that copies a model folder for modification."""

    def make(name: str = "llama", tokenizer: Any = None, **config: Any) -> Path:
        folder = shutil.copytree(zoo.folder(name), tmp_path / "model")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        change_json(folder / "config.json", **config)
        (folder / "generation_config.json").unlink()
        return folder

    return make


def load(folder: Path, **arguments: Any) -> CausalLM:
    return CausalLM(str(folder), **{"dtype": torch.float32, **arguments})


# --- Settings ---------------------------------------------------------------------------------------------------------


@CPU_ONLY
def test_cpu_default_dtype_is_float32(zoo: Zoo) -> None:
    lm = CausalLM(str(zoo.folder("gpt2")))
    assert lm.dtype == torch.float32
    assert lm.device == torch.device("cpu")
    assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.float32}


@CPU_ONLY
def test_requested_dtype_is_used(zoo: Zoo) -> None:
    lm = load(zoo.folder("llama"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.bfloat16}
    outputs = run(lm, request(0, [5] * 30), request(1, [7]))
    assert all(output.end is not None for output in outputs)


def test_padded_model_has_contract_properties(zoo: Zoo) -> None:
    lm = zoo.served("llama")
    assert lm.requires_padding
    assert lm.dynamic_adapter_loading_enabled is False
    assert (lm.rank, lm.world_size) == (0, 1)
    assert not lm.model.training
    assert lm.tokenizer.padding_side == lm.tokenizer.truncation_side == "left"


def test_compile_logs_warning(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lorax_server"):
        load(zoo.folder("gpt2"), compile=True)
    assert "compile is not supported here" in caplog.text


def test_unknown_quantize_method_is_rejected(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="quantize = 'gptq' is not supported here; use 'bitsandbytes'"):
        load(zoo.folder("gpt2"), quantize="gptq")


@pytest.mark.parametrize("missing", [["bitsandbytes"], ["accelerate", "bitsandbytes"]])
def test_missing_quantize_packages_error_names_extra(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    monkeypatch.setattr("lorax_server.models.pretrained.find_spec", lambda name: None if name in missing else object())
    with pytest.raises(ConfigError, match=rf"needs {' and '.join(missing)}: pip install lorax_server\[quantize\]"):
        load(zoo.folder("gpt2"), quantize="bitsandbytes")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_8_bit_logits_are_close_to_float32(zoo: Zoo) -> None:
    pytest.importorskip("bitsandbytes")
    lm, reference = load(zoo.folder("llama"), quantize="bitsandbytes"), zoo.served("llama")
    ids = torch.tensor([[5, 9, 20, 33, 41, 7, 8, 9]], device=lm.device)
    positions = torch.arange(8, device=lm.device)[None]
    logits, _ = lm.forward(ids, torch.ones_like(ids), positions)
    expected, _ = reference.forward(ids, torch.ones_like(ids), positions)
    assert 0 < (logits.float() - expected).abs().mean() < 0.1 * expected.std()
    outputs = run(lm, request(0), request(1, [7, 8]))
    assert all(output.end is not None and output.end.generated_tokens == 8 for output in outputs)
    assert any("8bit" in type(module).__name__ for module in lm.model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_model_without_quantizable_layers_is_rejected(zoo: Zoo) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="FalconForCausalLM has no layers that bitsandbytes can quantize"):
        load(zoo.folder("falcon"), quantize="bitsandbytes")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_8_bit_checkpoint_needs_no_quantize_setting(zoo: Zoo, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantized = load(zoo.folder("llama"), quantize="bitsandbytes")
    model: Any = quantized.model
    model.save_pretrained(tmp_path)
    quantized.tokenizer.save_pretrained(tmp_path)
    for quantize in (None, "bitsandbytes"):
        lm = load(tmp_path, quantize=quantize)
        assert any("8bit" in type(module).__name__ for module in lm.model.modules())
        assert run(lm, request(0))[0].token_ids == run(quantized, request(0))[0].token_ids


@pytest.mark.parametrize("stored", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "unheard of"}])
def test_unsupported_quantized_checkpoints_are_rejected(variant: Variant, stored: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"quantization method '{stored['quant_method']}' is not supported"):
        load(variant("llama", quantization_config=stored))


def test_folder_with_adapter_is_rejected(variant: Variant) -> None:
    """transformers would merge the adapter or load the adapter's base model."""
    folder = variant("llama")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "other/model"}')
    with pytest.raises(ConfigError, match="contains an adapter"):
        load(folder)


def test_remote_attention_code_is_rejected(variant: Variant) -> None:
    with pytest.raises(ConfigError, match="requests attention code from another repository"):
        load(variant("llama", attn_implementation="someone/kernel"))


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "x"}', "[]", '{"eos_token_id": [1, null]}'])
def test_damaged_generation_config_is_rejected(variant: Variant, text: str) -> None:
    folder = variant("gpt2")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        load(folder)


# --- Pad and EOS tokens -----------------------------------------------------------------------------------------------


def make_special_tokens(pad: int | None = None, eos: Any = None) -> Any:
    return SimpleNamespace(pad_token_id=pad, eos_token_id=eos)


@pytest.mark.parametrize(
    ("tokenizer", "config", "pad"),
    [
        (make_special_tokens(pad=3, eos=4), make_special_tokens(pad=5, eos=6), 3),
        (make_special_tokens(eos=4), make_special_tokens(pad=5, eos=6), 5),
        (make_special_tokens(eos=6), make_special_tokens(eos=6), 6),
        (make_special_tokens(eos=4), make_special_tokens(), 4),
        (make_special_tokens(), make_special_tokens(eos=[8, 7]), 7),
        (make_special_tokens(), make_special_tokens(pad=0), 0),
        (make_special_tokens(pad=100), make_special_tokens(pad=5), 5),
        (make_special_tokens(pad=100), make_special_tokens(pad=-1, eos=[200, 99]), 99),
    ],
)
def test_pad_token_is_first_token_in_vocabulary(tokenizer: Any, config: Any, pad: int) -> None:
    assert resolve_pad_token(tokenizer, config, 100) == pad


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        (make_special_tokens(), make_special_tokens()),
        (make_special_tokens(pad=100, eos=101), make_special_tokens(pad=-1)),
    ],
)
def test_missing_pad_token_error_suggests_fix(tokenizer: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="set pad_token_id or eos_token_id"):
        resolve_pad_token(tokenizer, config, 100)


def test_eos_tokens_are_merged_from_all_sources() -> None:
    assert eos_token_ids(
        make_special_tokens(eos=1),
        make_special_tokens(eos=[2, 3]),
        make_special_tokens(eos=(3, 4)),
        make_special_tokens(),
        None,
    ) == {1, 2, 3, 4}
    assert eos_token_ids(make_special_tokens(eos=-1), make_special_tokens(eos=[-1, 0])) == {0}


def test_eos_comes_from_configs_and_tokenizer(variant: Variant) -> None:
    folder = variant(eos_token_id=[7, 9])
    (folder / "generation_config.json").write_text('{"eos_token_id": [11, 7], "transformers_version": "5.0.0"}')
    lm = load(folder)
    assert lm.config.eos_token_id == [1, 7, 9, 11]
    for eos in (1, 7, 9, 11):
        (output,) = run(lm, request(0, logit_bias=[{"token_id": eos, "bias": 1e4}]))
        assert output.token_ids == [eos]


def test_eos_of_minus_one_is_ignored(variant: Variant) -> None:
    lm = load(variant(eos_token_id=-1))
    assert lm.config.eos_token_id == [1]  # the tokenizer's
    assert run(lm, request(0))[0].end is not None


@pytest.mark.parametrize("special", [{"bos_token": "<s>"}, {"bos_token": "<s>", "eos_token": "</s>"}])
def test_pad_token_unknown_to_tokenizer_is_accepted(variant: Variant, special: dict[str, str]) -> None:
    lm = load(variant(tokenizer=make_tokenizer(**special), pad_token_id=VOCAB - 1, eos_token_id=None))
    outputs = run(lm, request(0), request(1, [7, 8]))
    assert outputs[1].token_ids == run(lm, request(1, [7, 8]))[0].token_ids


def test_missing_pad_and_eos_is_rejected(variant: Variant) -> None:
    with pytest.raises(ConfigError, match="pad or EOS token"):
        load(variant(tokenizer=make_tokenizer(bos_token="<s>"), eos_token_id=None))


def test_pad_token_is_not_treated_as_special(variant: Variant) -> None:
    lm = load(variant(tokenizer=make_tokenizer(bos_token="<s>"), eos_token_id=None, pad_token_id=66))
    letter = lm.tokenizer.convert_ids_to_tokens(66)
    (output,) = run(lm, request(0, "hello", 3, logit_bias=[{"token_id": 66, "bias": 1e4}]))
    assert output.end is not None
    assert output.end.text == 3 * letter
    assert lm.tokenizer(f"b{letter}b")["input_ids"] == make_tokenizer()(f"b{letter}b")["input_ids"]


def test_tokenizer_larger_than_vocabulary_is_supported(variant: Variant) -> None:
    larger = make_tokenizer()
    larger.add_tokens([f"<new{i}>" for i in range(30)])
    lm = load(variant(tokenizer=larger))
    assert run(lm, request(0, "hello <new3>"))[0].end is not None
    with pytest.raises(InputError, match="token ID 309 is outside the model's vocabulary of 300"):
        run(lm, request(0, "hello <new29>"))


# --- Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "limit"),
    [
        ("gpt2", {"n_positions": 128}, 128),
        ("mpt", {"max_seq_len": 128}, 128),
        ("llama", {"max_position_embeddings": 128}, 128),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 32,
                }
            },
            32,
        ),
    ],
)
def test_max_positions_follow_config(variant: Variant, name: str, config: dict[str, Any], limit: int) -> None:
    lm = load(variant(name, **config))
    assert max_positions(lm.config) == limit
    run(lm, request(0, [5] * (limit - 1), 1))
    with pytest.raises(InputError, match=f"must be <= {limit}"):
        run(lm, request(0, [5] * limit, 1))


# --- Remote code ------------------------------------------------------------------------------------------------------

OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).write_text("run")

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def make_remote_code_model(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Create a model with remote code. Return its folder and the file that the code writes."""
    marker = tmp_path / "marker"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = variant(model_type="own", architectures=["OwnModel"], auto_map=auto_map)
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder, marker


def test_remote_code_does_not_run_by_default(make_remote_code_model: tuple[Path, Path]) -> None:
    folder, marker = make_remote_code_model
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load(folder)
    assert not marker.exists()


def test_trusted_remote_code_runs(make_remote_code_model: tuple[Path, Path]) -> None:
    folder, marker = make_remote_code_model
    lm = load(folder, trust_remote_code=True)
    assert type(lm.model).__name__ == "OwnModel"
    assert marker.exists()
    assert run(lm, request(0))[0].end is not None


class FileWriter:
    """An object that writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.write_text, (self.marker, "run")


def test_pickled_code_does_not_run(variant: Variant, tmp_path: Path) -> None:
    folder, marker = variant(), tmp_path / "marker"
    tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load(folder)  # without code it is an ordinary checkpoint
    torch.save(tensors | {"planted": FileWriter(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError):
        load(folder)
    assert not marker.exists()


# --- Rejected models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_models_are_rejected(name: str, zoo: Zoo) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{name}' has recurrent or other state besides the KV cache"):
        load(zoo.folder(name))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bart", "when a shorter prompt is padded"),
        ("bert", "when another token follows"),
        ("openai-gpt", "the model returns no KV cache"),
        ("xlnet", "the model returns no KV cache"),
    ],
)
def test_models_that_fail_padding_check_are_rejected(name: str, why: str, zoo: Zoo) -> None:
    """Bart ignores padding, encoders are not causal, others return no cache."""
    assert name in UNFIT
    with pytest.raises(UnsupportedModelError, match=f"cannot run in padded batches: .*{why}"):
        load(zoo.folder(name))


def test_error_names_missing_tensors(variant: Variant) -> None:
    folder = variant()
    tensors = load_file(folder / "model.safetensors")
    lost = [name for name in tensors if "layers.1.mlp" in name]
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in lost},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(WeightsError, match=r"lacks .*layers\.1\.mlp\.down_proj\.weight"):
        load(folder)


def test_tensor_shape_mismatch_is_rejected(variant: Variant) -> None:
    folder = variant()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError):
        load(folder)


def test_unused_tensors_are_logged(variant: Variant, caplog: pytest.LogCaptureFixture) -> None:
    folder = variant()
    tensors = load_file(folder / "model.safetensors") | {"visual.proj": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="lorax_server"):
        load(folder)
    assert "unused tensors in the checkpoint: visual.proj" in caplog.text


def test_error_names_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no-such"}', ""])
def test_damaged_config_is_rejected(variant: Variant, content: str) -> None:
    folder = variant()
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="the model config cannot be read"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"not tensors at all", b"\xff" * 64])
def test_damaged_weights_are_rejected(variant: Variant, content: bytes) -> None:
    folder = variant()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="cannot be loaded as a causal language model"):
        load(folder)


def test_truncated_weights_are_rejected(variant: Variant) -> None:
    folder = variant()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError):
        load(folder)


def test_missing_weights_are_rejected(variant: Variant) -> None:
    folder = variant()
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError):
        load(folder)


def test_damaged_tokenizer_is_rejected(variant: Variant) -> None:
    folder = variant()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        load(folder)


def test_nan_weights_are_rejected(variant: Variant) -> None:
    folder = variant()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((32,), float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="nan"):
        load(folder)
