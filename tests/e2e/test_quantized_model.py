"""QLoRA with real processes: train with PEFT on a 4-bit base model, serve the quantized checkpoint and the adapter."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from tests.e2e.http_server import ids_of, make_tokenizer, serving
from tests.parity.oracle import oracle_greedy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

PROMPT = "The quick brown fox"
NEW_TOKENS = 12


def write_model(folder: Path, **quantization: Any) -> None:
    """Write a model whose linear layers bitsandbytes quantized, as for QLoRA training."""
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
    }
    config = LlamaConfig(**sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.3)
    model.save_pretrained(folder / "float")
    quantized = AutoModelForCausalLM.from_pretrained(
        folder / "float", dtype=torch.float32, quantization_config=BitsAndBytesConfig(**quantization)
    )
    quantized.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train(model: Any, folder: Path) -> None:
    """Train an adapter for a few steps."""
    torch.manual_seed(1)
    trained: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=0.02)
    tokens = torch.randint(10, 200, (2, 12))
    for _ in range(8):
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.save_pretrained(folder)


@pytest.fixture(autouse=True)
def exact_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent bitsandbytes from computing in bfloat16, which it does on some CPUs."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.mark.parametrize("is_nested", [False, True], ids=["nf4", "double"])
def test_adapter_trained_on_4_bit_model_is_served(is_nested: bool, tmp_path: Path) -> None:
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": is_nested}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_model(tmp_path, **quantization)
        train(load(tmp_path / "model"), tmp_path / "adapters" / "trained")
        adapted = PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapters" / "trained").eval()
    with serving(tmp_path, "--dtype", "float32") as server:
        assert server.send("GET", "/info").json["weight_format"] == "float32 from bitsandbytes-nf4"
        completions = {}
        for adapter, model in {"trained": adapted.get_base_model(), None: load(tmp_path / "model")}.items():
            parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos_token": True}
            names = {} if adapter is None else {"adapter_id": adapter}
            reply = server.post("/generate", {"inputs": PROMPT, "parameters": parameters | names})
            assert reply.status == 200, reply.body
            completions[adapter] = [token["id"] for token in reply.json["details"]["tokens"]]
            expected = oracle_greedy(model, ids_of([PROMPT])[0], NEW_TOKENS, {})
            assert len(expected) > NEW_TOKENS // 2  # up to a near tie
            assert completions[adapter][: len(expected)] == expected
        assert completions["trained"] != completions[None]
        assert server.stop() == 0
