"""The supported model types. This module does not import torch, so configs can be checked before it is loaded."""

from difflib import get_close_matches
from string import ascii_lowercase

# `model_type` in `config.json` -> file and class in `models/custom_modeling/`.
MODELS = {
    "arcee": "flash_arcee_modeling.FlashArceeForCausalLM",
    "bloom": "flash_bloom_modeling.FlashBloomForCausalLM",
    "cohere": "flash_cohere_modeling.FlashCohereForCausalLM",
    "cohere2": "flash_cohere2_modeling.FlashCohere2ForCausalLM",
    "exaone4": "flash_exaone4_modeling.FlashExaone4ForCausalLM",
    "falcon": "flash_falcon_modeling.FlashFalconForCausalLM",
    "gemma": "flash_gemma_modeling.FlashGemmaForCausalLM",
    "gemma2": "flash_gemma2_modeling.FlashGemma2ForCausalLM",
    "gemma3_text": "flash_gemma3_modeling.FlashGemma3ForCausalLM",
    "glm": "flash_glm_modeling.FlashGLMForCausalLM",
    "glm4": "flash_glm4_modeling.FlashGLM4ForCausalLM",
    "gpt2": "flash_gpt2_modeling.FlashGPT2ForCausalLM",
    "gpt_bigcode": "flash_gpt_bigcode_modeling.FlashGPTBigCodeForCausalLM",
    "gpt_neox": "flash_neox_modeling.FlashGPTNeoXForCausalLM",
    "gptj": "flash_gptj_modeling.FlashGPTJForCausalLM",
    "granite": "flash_granite_modeling.FlashGraniteForCausalLM",
    "llama": "flash_llama_modeling.FlashLlamaForCausalLM",
    "mistral": "flash_mistral_modeling.FlashMistralForCausalLM",
    "mpt": "flash_mpt_modeling.FlashMPTForCausalLM",
    "nemotron": "flash_nemotron_modeling.FlashNemotronForCausalLM",
    "olmo2": "flash_olmo2_modeling.FlashOLMo2ForCausalLM",
    "opt": "flash_opt_modeling.FlashOPTForCausalLM",
    "phi": "flash_phi_modeling.FlashPhiForCausalLM",
    "phi3": "flash_phi3_modeling.FlashPhi3ForCausalLM",
    "qwen2": "flash_qwen2_modeling.FlashQwen2ForCausalLM",
    "qwen3": "flash_qwen3_modeling.FlashQwen3ForCausalLM",
    "smollm3": "flash_smollm3_modeling.FlashSmolLM3ForCausalLM",
    "stablelm": "flash_stablelm_modeling.FlashStableLMForCausalLM",
    "starcoder2": "flash_starcoder2_modeling.FlashStarCoder2ForCausalLM",
}

# Maps a model type to a config field. Models that set this field run in padded batches.
PADDED_ONLY_FIELDS = {"falcon": "alibi"}


def find_similar_types(model_type: str) -> list[str]:
    """Return supported model types with names similar to `model_type`, which is unsupported."""
    name = model_type.lower()
    stem = name[: len(name) - len(name.lstrip(ascii_lowercase))]
    same = [known for known in sorted(MODELS) if stem and known.startswith(stem)]
    return list(dict.fromkeys([*same, *get_close_matches(name, sorted(MODELS))]))
