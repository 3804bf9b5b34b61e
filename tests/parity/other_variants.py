"""Test variants of architectures without a seed contract, see `variants.py`."""

from dataclasses import replace
from typing import Any

from transformers import (
    ArceeConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPTBigCodeConfig,
    GPTJConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    MixtralConfig,
    MptConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.parity.variant import GATED, GQA, LONG, NO_SCALING, SIZES, VOCAB, Variant, rope

GEMMA = GQA | {"head_dim": 16}
GEMMA2 = GEMMA | {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
GEMMA3 = GEMMA | {
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA3 |= {"num_hidden_layers": 4}
LAYER_TYPES = ("sliding_attention", "full_attention")
TWO_ROPES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    }
}
ONE_ROPE = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 100.0} for kind in LAYER_TYPES}}
GRANITE: dict[str, Any] = GQA | {
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
SMOLLM3 = GQA | {"tie_word_embeddings": False, "no_rope_layers": [1, 0, 1]}
MIXTRAL = GQA | {"num_local_experts": 6, "num_experts_per_tok": 3}
MIXTURE = GQA | {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

QWEN2_MIXTURE = {name: value for name, value in MIXTURE.items() if name != "head_dim"}
QWEN2_MIXTURE |= {"shared_expert_intermediate_size": 40, "qkv_bias": True}
GLM_MIXTURE: dict[str, Any] = GQA | {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}

LATENT = GATED | {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
DEEPSEEK2 = LATENT | {"topk_method": "group_limited_greedy"}
GLM4_LITE = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"} | {"q_lora_rank": 12}
LATENT_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}

GPT_OSS: dict[str, Any] = (
    GQA
    | {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 24,
        "sliding_window": 5,
        "swiglu_limit": 1.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    | rope("default")
)

PARTIAL = rope("default", partial_rotary_factor=0.5)
WHOLE = rope("default", partial_rotary_factor=1.0)
PHI = GQA | {"hidden_size": 64} | PARTIAL
GLM = GQA | {"head_dim": 16} | PARTIAL
GLM_MIXTURE |= PARTIAL
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5)
COHERE = GQA | {"logit_scale": 0.5, "layer_norm_eps": 1e-5}
GPTJ = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 8}
FALCON = SIZES | {"max_position_embeddings": 128, "hidden_size": 64}
FALCON_NEW = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
BIGCODE: dict[str, Any] = GPTJ | {"n_embd": 32}
BIGCODE.pop("rotary_dim")
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}
MPT: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}

OTHER_VARIANTS = {
    "falcon": Variant(FalconConfig, FALCON, off={"multi_query": False}),
    "falcon-40b-like": Variant(FalconConfig, FALCON_NEW | {"bias": True}, off={"num_kv_heads": 4}),
    "falcon-11b-like": Variant(
        FalconConfig,
        FALCON_NEW | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80, "tie_word_embeddings": False},
        off={"num_ln_in_parallel_attn": 2},
    ),
    "falcon-sequential": Variant(
        FalconConfig, FALCON | {"parallel_attn": False, "multi_query": False}, off={"parallel_attn": True}
    ),
    "falcon-relu": Variant(FalconConfig, FALCON | {"activation": "relu"}, off={"activation": "gelu"}),
    "bigcode": Variant(GPTBigCodeConfig, BIGCODE, off={"scale_attn_weights": False}),
    "bigcode-many-keys": Variant(
        GPTBigCodeConfig,
        BIGCODE | {"multi_query": False, "n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False},
        off={"activation_function": "gelu"},
    ),
    "bigcode-no-scale": Variant(
        GPTBigCodeConfig, BIGCODE | {"scale_attn_weights": False}, off={"scale_attn_weights": True}
    ),
    "bloom": Variant(BloomConfig, BLOOM, off={"layer_norm_epsilon": 0.5}),
    "bloom-embedding-norm": Variant(BloomConfig, BLOOM, spoil=(r"word_embeddings_layernorm\.weight", 1.0)),
    "bloom-odd-heads": Variant(BloomConfig, BLOOM | {"hidden_size": 96, "n_head": 12}, off={"n_head": 6}),
    "mpt": Variant(MptConfig, MPT, off={"attn_config": {"alibi_bias_max": 2}}),
    "mpt-scale": Variant(
        MptConfig, MPT | {"attn_config": {"softmax_scale": 0.9}}, off={"attn_config": {"softmax_scale": None}}
    ),
    "mpt-odd-heads": Variant(
        MptConfig, MPT | {"d_model": 96, "n_heads": 12, "tie_word_embeddings": False}, off={"n_heads": 6}
    ),
    "phi3": Variant(Phi3Config, GQA | {"sliding_window": None}, off={"num_key_value_heads": 1}),
    "phi3-window": Variant(Phi3Config, GQA | {"sliding_window": 5}, off={"sliding_window": None}),
    "phi3-partial-rotary": Variant(Phi3Config, PHI | {"tie_word_embeddings": True}, off=WHOLE),
    "phi3-longrope-within": Variant(
        Phi3Config,
        GQA | {"original_max_position_embeddings": 64} | rope("longrope", **LONG),
        off=NO_SCALING,
    ),
    "phi3-longrope-beyond": Variant(
        Phi3Config,
        GQA
        | {"original_max_position_embeddings": 16}
        | rope("longrope", **LONG | {"original_max_position_embeddings": 16}),
        off={"original_max_position_embeddings": 64} | rope("longrope", **LONG),
    ),
    "stablelm": Variant(StableLmConfig, PHI, off={"use_qkv_bias": True}),
    "stablelm-bias": Variant(StableLmConfig, PHI | {"use_qkv_bias": True}, off={"use_qkv_bias": False}),
    "stablelm-parallel": Variant(
        StableLmConfig, PHI | {"use_parallel_residual": True}, off={"use_parallel_residual": False}
    ),
    "stablelm-head-norms": Variant(StableLmConfig, PHI | {"qk_layernorm": True}, off={"qk_layernorm": False}),
    "starcoder2": Variant(
        Starcoder2Config, GQA | {"sliding_window": None, "tie_word_embeddings": True}, off={"norm_epsilon": 0.5}
    ),
    "starcoder2-window": Variant(
        Starcoder2Config,
        GQA | {"sliding_window": 5, "use_bias": False, "tie_word_embeddings": False},
        off={"sliding_window": None},
    ),
    "cohere": Variant(CohereConfig, COHERE, off={"logit_scale": 1.0}),
    "cohere-head-norm": Variant(
        CohereConfig, COHERE | {"use_qk_norm": True, "attention_bias": True}, off={"use_qk_norm": False}
    ),
    "cohere2": Variant(
        Cohere2Config,
        COHERE | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        off={"sliding_window": 50},
    ),
    "cohere2-rope-by-layer": Variant(
        Cohere2Config,
        COHERE | {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        off={"layer_types": ["sliding_attention"] * 3},
    ),
    "glm": Variant(GlmConfig, GLM | {"attention_bias": True}, off={"attention_bias": False}),
    "glm-whole-rotary": Variant(
        GlmConfig, GLM | WHOLE | {"attention_bias": False, "tie_word_embeddings": True}, off=PARTIAL
    ),
    "glm4": Variant(Glm4Config, GLM, off=WHOLE),
    "glm4-post-norms": Variant(
        Glm4Config, GLM | {"attention_bias": False}, spoil=(r"post_(self_attn|mlp)_layernorm\.weight", 1.0)
    ),
    "glm4-yarn": Variant(Glm4Config, GLM | YARN | {"tie_word_embeddings": True}, off=PARTIAL),
    "nemotron": Variant(NemotronConfig, PHI | {"head_dim": 16}, off={"hidden_act": "silu"}),
    "nemotron-biases": Variant(
        NemotronConfig,
        PHI | {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        off=rope("default", partial_rotary_factor=0.25),
    ),
    "arcee": Variant(ArceeConfig, GQA, off={"hidden_act": "silu"}),
    "arcee-biases": Variant(
        ArceeConfig, GQA | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}, off={"mlp_bias": False}
    ),
    "phi": Variant(PhiConfig, PHI, off=WHOLE),
    "phi-head-norms": Variant(PhiConfig, PHI | {"qk_layernorm": True}, off={"qk_layernorm": False}),
    "phi-head-bias": Variant(PhiConfig, PHI, spoil=(r"lm_head\.bias", 0.0)),
    "gptj": Variant(GPTJConfig, GPTJ, off={"rotary_dim": 4}),
    "gptj-n-inner": Variant(
        GPTJConfig, GPTJ | {"n_inner": 40, "activation_function": "relu"}, off={"activation_function": "gelu"}
    ),
    "gptj-head-bias": Variant(GPTJConfig, GPTJ, spoil=(r"lm_head\.bias", 0.0)),
    "gemma": Variant(GemmaConfig, GEMMA, off={"hidden_act": "silu"}),
    "gemma-untied-bias": Variant(
        GemmaConfig, GEMMA | {"attention_bias": True, "tie_word_embeddings": False}, off={"attention_bias": False}
    ),
    "gemma2": Variant(Gemma2Config, GEMMA2, off={"attn_logit_softcapping": None}),
    "gemma2-logit-cap": Variant(
        Gemma2Config, GEMMA2 | {"final_logit_softcapping": 3.0}, off={"final_logit_softcapping": None}
    ),
    "gemma2-scale": Variant(Gemma2Config, GEMMA2 | {"query_pre_attn_scalar": 3}, off={"query_pre_attn_scalar": 16}),
    "gemma2-window": Variant(Gemma2Config, GEMMA2, off={"layer_types": ["full_attention"] * 3}),
    "gemma2-no-caps": Variant(
        Gemma2Config,
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "silu"},
        off={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma3": Variant(Gemma3TextConfig, GEMMA3 | TWO_ROPES, off=ONE_ROPE),
    "gemma3-window": Variant(
        Gemma3TextConfig, GEMMA3 | TWO_ROPES | {"final_logit_softcapping": 4.0}, off={"sliding_window": 2}
    ),
    "gemma3-head-norm": Variant(Gemma3TextConfig, GEMMA3, spoil=(r"[qk]_norm\.weight", 0.0)),
    "granite": Variant(GraniteConfig, GRANITE, off={"residual_multiplier": 1.0}),
    "granite-embeddings": Variant(GraniteConfig, GRANITE, off={"embedding_multiplier": 1.0}),
    "granite-scores": Variant(GraniteConfig, GRANITE, off={"attention_multiplier": 1.0}),
    "granite-logits": Variant(GraniteConfig, GRANITE | {"mlp_bias": True}, off={"logits_scaling": 1.0}),
    "smollm3": Variant(SmolLM3Config, SMOLLM3, off={"no_rope_layers": [1, 1, 1]}),
    "smollm3-window": Variant(
        SmolLM3Config,
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True},
        off={"layer_types": ["full_attention"] * 3},
    ),
    "olmo2": Variant(Olmo2Config, GQA, spoil=(r"[qk]_norm\.weight", 1.0)),
    "olmo2-post-norms": Variant(Olmo2Config, GQA | {"attention_bias": True}, off={"rms_norm_eps": 0.5}),
    "exaone4": Variant(
        Exaone4Config,
        GQA | {"sliding_window": 5, "sliding_window_pattern": 3},
        off={"layer_types": ["full_attention"] * 3},
    ),
    "exaone4-no-window": Variant(
        Exaone4Config,
        GQA | {"sliding_window": None, "layer_types": ["full_attention"] * 3} | rope("default", rope_theta=500.0),
        off=rope("default"),
    ),
    "mixtral": Variant(MixtralConfig, MIXTRAL, off={"num_experts_per_tok": 2}),
    "mixtral-window": Variant(MixtralConfig, MIXTRAL | {"sliding_window": 6}, off={"sliding_window": None}),
    "qwen3moe": Variant(Qwen3MoeConfig, MIXTURE, off={"num_experts_per_tok": 2}),
    "qwen3moe-unnormalized": Variant(Qwen3MoeConfig, MIXTURE | {"norm_topk_prob": False}, off={"norm_topk_prob": True}),
    "qwen3moe-router": Variant(Qwen3MoeConfig, MIXTURE, spoil=(r"mlp\.gate\.weight", 0.0)),
    "qwen3moe-dense-layers": Variant(
        Qwen3MoeConfig,
        MIXTURE | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "attention_bias": True},
        off={"attention_bias": False},
    ),
    "qwen3moe-window": Variant(
        Qwen3MoeConfig, MIXTURE | {"use_sliding_window": True, "sliding_window": 5}, off={"sliding_window": None}
    ),
    "qwen2moe": Variant(Qwen2MoeConfig, QWEN2_MIXTURE, off={"num_experts_per_tok": 2}),
    "qwen2moe-shared": Variant(
        Qwen2MoeConfig,
        QWEN2_MIXTURE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
        spoil=(r"shared_expert_gate", 0.0),
    ),
    "qwen2moe-no-bias": Variant(Qwen2MoeConfig, QWEN2_MIXTURE | {"qkv_bias": False}, off={"qkv_bias": True}),
    "olmoe": Variant(
        OlmoeConfig,
        GQA | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "norm_topk_prob": False},
        off={"norm_topk_prob": True},
    ),
    "olmoe-head-norms": Variant(
        OlmoeConfig,
        GQA | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
        spoil=(r"[qk]_norm\.weight", 1.0),
    ),
    "granitemoe": Variant(
        GraniteMoeConfig,
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3},
        off={"num_experts_per_tok": 2},
    ),
    "granitemoe-residual": Variant(
        GraniteMoeConfig,
        GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
        off={"residual_multiplier": 1.0},
    ),
    "gptoss": Variant(GptOssConfig, GPT_OSS, spoil=(r"sinks", -30.0)),
    "gptoss-window": Variant(
        GptOssConfig, GPT_OSS | {"attention_bias": False}, off={"layer_types": ["full_attention"] * 3}
    ),
    "gptoss-clamp": Variant(GptOssConfig, GPT_OSS, off={"swiglu_limit": 50.0}),
    "gptoss-yarn": Variant(
        GptOssConfig,
        GPT_OSS
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False, beta_fast=32.0, beta_slow=1.0),
        off=NO_SCALING,
    ),
    "gptoss-biases": Variant(GptOssConfig, GPT_OSS, spoil=(r"proj_bias", 0.0)),
    "glm4moe": Variant(Glm4MoeConfig, GLM_MIXTURE, off={"topk_group": 4}),
    "glm4moe-bias": Variant(
        Glm4MoeConfig,
        GLM_MIXTURE | {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": True},
        spoil=(r"e_score_correction_bias", 0.0),
    ),
    "glm4moe-scale": Variant(
        Glm4MoeConfig, GLM_MIXTURE | {"norm_topk_prob": False}, off={"routed_scaling_factor": 1.0}
    ),
    "glm4moe-head-norms": Variant(Glm4MoeConfig, GLM_MIXTURE, spoil=(r"[qk]_norm\.weight", 1.0)),
    "glm4moe-shared": Variant(Glm4MoeConfig, GLM_MIXTURE, spoil=(r"shared_experts\.down_proj", 0.0)),
    "deepseek2": Variant(DeepseekV2Config, DEEPSEEK2 | {"q_lora_rank": 12}, off={"topk_group": 4}),
    "deepseek2-lite": Variant(
        DeepseekV2Config, DEEPSEEK2 | {"topk_method": "greedy"}, off={"topk_method": "group_limited_greedy"}
    ),
    "deepseek2-scale": Variant(DeepseekV2Config, DEEPSEEK2, off={"routed_scaling_factor": 1.0}),
    "deepseek2-biases": Variant(
        DeepseekV2Config,
        DEEPSEEK2 | {"q_lora_rank": 12, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0},
        off={"mlp_bias": False},
    ),
    "deepseek2-yarn": Variant(
        DeepseekV2Config,
        DEEPSEEK2 | {"q_lora_rank": 12} | rope("yarn", **LATENT_YARN, mscale=0.8, mscale_all_dim=1.0),
        off=rope("yarn", **LATENT_YARN, mscale=0.8, mscale_all_dim=0.0),
    ),
    "deepseek2-norms": Variant(
        DeepseekV2Config, DEEPSEEK2 | {"q_lora_rank": 12}, spoil=(r"(q|kv)_a_layernorm\.weight", 1.0)
    ),
    "deepseek3": Variant(DeepseekV3Config, LATENT | {"q_lora_rank": 12}, off={"topk_group": 4}),
    "deepseek3-interleave": Variant(DeepseekV3Config, LATENT, off={"rope_interleave": False}),
    "deepseek3-no-interleave": Variant(
        DeepseekV3Config, LATENT | {"rope_interleave": False}, off={"rope_interleave": True}
    ),
    "deepseek3-unnormalized": Variant(
        DeepseekV3Config,
        LATENT | {"norm_topk_prob": False, "attention_bias": True, "q_lora_rank": 12},
        off={"norm_topk_prob": True},
    ),
    "deepseek3-bias": Variant(
        DeepseekV3Config, LATENT | {"n_group": 1, "topk_group": 1}, spoil=(r"e_score_correction_bias", 0.0)
    ),
    "deepseek3-dense": Variant(
        DeepseekV3Config,
        LATENT | {"first_k_dense_replace": 3, "tie_word_embeddings": True},
        off={"rms_norm_eps": 0.5},
    ),
    "deepseek3-yarn": Variant(
        DeepseekV3Config,
        LATENT | rope("yarn", **LATENT_YARN, mscale=1.0, mscale_all_dim=1.0),
        off=rope("yarn", **LATENT_YARN, mscale=1.0, mscale_all_dim=0.0),
    ),
    "glm4lite": Variant(
        Glm4MoeLiteConfig,
        GLM4_LITE | {"mlp_layer_types": ["dense", "sparse", "dense"]},
        off={"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm4lite-bias": Variant(
        Glm4MoeLiteConfig, GLM4_LITE | {"attention_bias": True}, spoil=(r"e_score_correction_bias", 0.0)
    ),
    "deepseek3-shared": Variant(DeepseekV3Config, LATENT, spoil=(r"shared_experts\.down_proj", 0.0)),
}
# These models store norm weights minus one.
OTHER_VARIANTS |= {
    n: replace(v, norm_mean=0.0) for n, v in OTHER_VARIANTS.items() if n.startswith(("gemma", "nemotron"))
}
