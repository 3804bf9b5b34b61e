"""Small models of every architecture with the head sizes of published ones, for comparisons in half precision."""

from typing import Any

from transformers import (
    ArceeConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.parity.variant import Variant, rope

VOCAB = 384
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512}
GATED = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
GATED_128 = GATED | {"head_dim": 128}
GPT2 = {"vocab_size": VOCAB, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512}
NEOX = SIZES | {"hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 4}
OPT = SIZES | {"hidden_size": 256, "ffn_dim": 512, "num_attention_heads": 4}
GEMMA = GATED | {"head_dim": 256}
GEMMA2 = GEMMA | {"sliding_window": 50, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 5.0}
BY_LAYER = {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]}
OF_80 = GATED | {"hidden_size": 320}
GRANITE = GATED | {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 512, "n_layer": 2, "n_head": 4}
MPT: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 384, "n_heads": 6, "n_layers": 2, "max_seq_len": 512}
FALCON = SIZES | {"hidden_size": 512, "num_attention_heads": 8}
MANY_HEADS = GPT2 | {"n_embd": 1280, "n_head": 20}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

MODELS = {
    "llama-gqa-64": Variant(LlamaConfig, GATED | {"num_hidden_layers": 3}),
    "llama-mha-bias-128": Variant(
        LlamaConfig, GATED_128 | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-tied-80": Variant(LlamaConfig, GATED | {"head_dim": 80, "tie_word_embeddings": True}),
    "llama-mqa-256": Variant(LlamaConfig, GATED | {"head_dim": 256, "num_key_value_heads": 1}),
    "mistral-window-128": Variant(MistralConfig, GATED_128 | {"sliding_window": 50}),
    "qwen2-64": Variant(Qwen2Config, GATED | {"hidden_size": 384, "num_attention_heads": 6}),
    "qwen3-128": Variant(Qwen3Config, GATED_128),
    "gpt2-64": Variant(GPT2Config, GPT2),
    "neox-96": Variant(GPTNeoXConfig, NEOX),
    "opt-64": Variant(OPTConfig, OPT),
    "gemma-256": Variant(GemmaConfig, GEMMA, norm_mean=0.0),
    "gemma2-256": Variant(Gemma2Config, GEMMA2 | BY_LAYER, norm_mean=0.0),
    "gemma3-256": Variant(Gemma3TextConfig, GEMMA | BY_LAYER | {"query_pre_attn_scalar": 256}, norm_mean=0.0),
    "granite-64": Variant(GraniteConfig, GRANITE),
    "smollm3-128": Variant(SmolLM3Config, GATED_128 | {"no_rope_layers": [1, 0]}),
    "olmo2-64": Variant(Olmo2Config, GATED),
    "exaone4-128": Variant(Exaone4Config, GATED_128 | BY_LAYER),
    "stablelm-80": Variant(StableLmConfig, OF_80 | rope("default", partial_rotary_factor=0.25)),
    "cohere-64": Variant(CohereConfig, GATED | {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2-64": Variant(Cohere2Config, GATED | BY_LAYER | {"logit_scale": 0.5}),
    "glm-128": Variant(GlmConfig, GATED_128 | rope("default", partial_rotary_factor=0.5)),
    "glm4-128": Variant(Glm4Config, GATED_128 | rope("default", partial_rotary_factor=0.5)),
    "nemotron-128": Variant(
        NemotronConfig, GATED_128 | rope("default", partial_rotary_factor=0.5), norm_mean=0.0
    ),
    "arcee-128": Variant(ArceeConfig, GATED_128),
    "starcoder2-64": Variant(Starcoder2Config, GATED | {"sliding_window": 50}),
    "phi-80": Variant(PhiConfig, OF_80 | rope("default", partial_rotary_factor=0.4)),
    "phi3-96": Variant(Phi3Config, GATED | {"hidden_size": 384, "sliding_window": None}),
    "gptj-256": Variant(GPTJConfig, GPT2 | {"n_embd": 512, "n_head": 2, "rotary_dim": 64}),
    "bigcode-64": Variant(GPTBigCodeConfig, MANY_HEADS),
    "falcon-64": Variant(FalconConfig, FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom-128": Variant(BloomConfig, BLOOM),
    "mpt-64": Variant(MptConfig, MPT),
    "mixtral-128": Variant(MixtralConfig, GATED_128 | LOCAL_EXPERTS),
    "qwen2moe-64": Variant(Qwen2MoeConfig, GATED | EXPERTS | {"shared_expert_intermediate_size": 256}),
    "qwen3moe-128": Variant(Qwen3MoeConfig, GATED_128 | EXPERTS),
    "olmoe-64": Variant(OlmoeConfig, GATED | EXPERTS | {"intermediate_size": 128}),
    "granitemoe-64": Variant(GraniteMoeConfig, GRANITE | LOCAL_EXPERTS),
    "gptoss-64": Variant(GptOssConfig, GATED | LOCAL_EXPERTS | BY_LAYER | rope("default")),
    "glm4moe-128": Variant(
        Glm4MoeConfig, GATED_128 | GLM_EXPERTS | rope("default", partial_rotary_factor=0.5) | {"use_qk_norm": True}
    ),
}  # fmt: skip
# Hopper attention supports neither ALiBi, sinks nor more than 16 query heads per key head. These models use Triton.
LEFT_TO_TRITON = ("bigcode-64", "bloom-128", "mpt-64", "gptoss-64")
