"""Tiny random models of many architectures with a byte-level tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lorax_server.models.causal_lm import CausalLM

VOCAB = 300  # larger than the tokenizer's vocabulary, because embeddings are often padded
TOKENS = 280
BOS_ID, EOS_ID = 0, 1
SPREAD = 0.3  # large, so that greedy text does not repeat one token
CORPUS = "the quick brown fox jumps over the lazy dog, and the world saw them there; naïve, 日本語, 👋🌍 hello hello"

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": SPREAD,
    "pad_token_id": None,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
NO_GQA = COMMON | {"intermediate_size": 48, "max_position_embeddings": 128}
LLAMA = NO_GQA | {"num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": SPREAD,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
BLOOM: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": SPREAD}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
LINEAR_HEADS: dict[str, Any] = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 8 for kind in ("key", "value")
}
WINDOW = 4  # shorter than the prompts

# Supported models, created on demand because some configs are slow to create.
SERVED: dict[str, Callable[[], Any]] = {
    "bert-decoder": lambda: t.BertConfig(**NO_GQA | {"pad_token_id": 0}, is_decoder=True),
    "biogpt": lambda: t.BioGptConfig(**NO_GQA),
    "bloom": lambda: t.BloomConfig(**BLOOM, eos_token_id=EOS_ID),
    "codegen": lambda: t.CodeGenConfig(**GPT2, rotary_dim=4, n_ctx=128),
    "cohere": lambda: t.CohereConfig(**LLAMA),
    "cohere2-window": lambda: t.Cohere2Config(
        **LLAMA | {"head_dim": 8}, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "ctrl": lambda: t.CTRLConfig(**GPT2, dff=32),
    "deepseek-v3": lambda: t.DeepseekV3Config(**DEEPSEEK),
    "falcon": lambda: t.FalconConfig(**COMMON, alibi=False, new_decoder_architecture=False),
    "falcon-alibi": lambda: t.FalconConfig(**COMMON, alibi=True, new_decoder_architecture=False),
    "falcon-new": lambda: t.FalconConfig(**COMMON, num_kv_heads=2, new_decoder_architecture=True),
    "gemma": lambda: t.GemmaConfig(**LLAMA, head_dim=8),
    "gemma2-window": lambda: t.Gemma2Config(**LLAMA, head_dim=8, sliding_window=WINDOW),
    "gemma3-window": lambda: t.Gemma3TextConfig(
        **LLAMA, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "glm": lambda: t.GlmConfig(**LLAMA, head_dim=8),
    "gpt-bigcode": lambda: t.GPTBigCodeConfig(**GPT2),
    "gpt-j": lambda: t.GPTJConfig(**GPT2, rotary_dim=4),
    "gpt-neo-window": lambda: t.GPTNeoConfig(
        **{name: value for name, value in COMMON.items() if not name.startswith("num_")},
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=128,
    ),
    "gpt-oss-window": lambda: t.GptOssConfig(**LLAMA, head_dim=8, num_local_experts=4, sliding_window=WINDOW),
    "gpt2": lambda: t.GPT2Config(**GPT2),
    "granite": lambda: t.GraniteConfig(**LLAMA),
    "llama": lambda: t.LlamaConfig(**LLAMA),
    "llama4-chunks": lambda: t.Llama4TextConfig(
        **LLAMA,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "mistral-window": lambda: t.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "mixtral": lambda: t.MixtralConfig(**LLAMA, num_local_experts=4),
    "mpt": lambda: t.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB, max_seq_len=128, initializer_range=SPREAD, eos_token_id=1
    ),
    "nemotron": lambda: t.NemotronConfig(**LLAMA),
    "olmo2": lambda: t.Olmo2Config(**LLAMA),
    "opt": lambda: t.OPTConfig(**COMMON, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=32),
    "persimmon": lambda: t.PersimmonConfig(**NO_GQA),
    "phi": lambda: t.PhiConfig(**LLAMA),
    "phi3": lambda: t.Phi3Config(**LLAMA),
    "qwen2-moe": lambda: t.Qwen2MoeConfig(**LLAMA, **EXPERTS, shared_expert_intermediate_size=24),
    "stablelm": lambda: t.StableLmConfig(**LLAMA),
    "starcoder2": lambda: t.Starcoder2Config(**LLAMA),
    "xglm": lambda: t.XGLMConfig(
        vocab_size=VOCAB,
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=48,
        init_std=SPREAD,
        max_position_embeddings=128,
        eos_token_id=EOS_ID,
    ),
}

# Models with state other than keys and values.
STATEFUL: dict[str, Callable[[], Any]] = {
    "jamba": lambda: t.JambaConfig(**LLAMA, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, num_experts=2),
    "mamba": lambda: t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, eos_token_id=EOS_ID),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **LLAMA, **EXPERTS, **LINEAR_HEADS, head_dim=8, shared_expert_intermediate_size=16
    ),
    "recurrent_gemma": lambda: t.RecurrentGemmaConfig(
        **COMMON, intermediate_size=48, lru_width=32, block_types=["recurrent", "attention"], attention_window_size=4
    ),
    "rwkv": lambda: t.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, eos_token_id=EOS_ID),
}

# Models without padding support, causal attention or a KV cache.
UNFIT: dict[str, Callable[[], Any]] = {
    "bart": lambda: t.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        max_position_embeddings=128,
    ),
    "bert": lambda: t.BertConfig(**NO_GQA),
    "openai-gpt": lambda: t.OpenAIGPTConfig(**GPT2),
    "xlnet": lambda: t.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=32, eos_token_id=EOS_ID),
}

ALL = SERVED | STATEFUL | UNFIT


def make_tokenizer(**special: str | None) -> PreTrainedTokenizerFast:
    """Create a tokenizer with 256 bytes, some merges and two special tokens, by default `bos_token` and `eos_token`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    assert tokenizer.get_vocab_size() == TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special or {"bos_token": "<s>", "eos_token": "</s>"}))


@torch.no_grad()
def make_model(config: Any, seed: int = 1) -> Any:
    """Create a random model with small embeddings, because large ones make it repeat its input."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, SPREAD)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.normal_(0, SPREAD / 8)
    return model


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Pair(NamedTuple):
    """A transformers model, and the same model loaded as `CausalLM`."""

    oracle: Any
    served: CausalLM


class Zoo:
    """Model cache: creates each model once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oracles: dict[str, Any] = {}
        self._pairs: dict[str, Pair] = {}

    def folder(self, name: str) -> Path:
        """Return the model folder. Tests must not modify it."""
        folder = self._folder / name
        if name not in self._oracles:
            self._oracles[name] = make_model(ALL[name]())
            save(folder, self._oracles[name], make_tokenizer())
        return folder

    def pair(self, name: str) -> Pair:
        if name not in self._pairs:
            served = CausalLM(str(self.folder(name)), dtype=torch.float32)
            self._pairs[name] = Pair(self._oracles[name].to(served.device), served)
        return self._pairs[name]

    def served(self, name: str) -> CausalLM:
        return self.pair(name).served
