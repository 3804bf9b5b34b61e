"""Seed contracts: import paths, class names, parameters and their order."""

import inspect
from importlib import import_module

import pytest

PAGED = [
    "input_ids",
    "position_ids",
    "cu_seqlen_prefill",
    "kv_cache",
    "block_tables",
    "slots",
    "seqlen",
    "max_s",
    "adapter_data",
    "prefill_cache_indices",
    "lm_head_indices",
]
CONTRACTS = {
    "neox_modeling.GPTNeoxForCausalLM": (
        ["config", "weights"],
        [
            "input_ids",
            "attention_mask",
            "position_ids",
            "inputs_embeds",
            "head_mask",
            "past_key_values",
            "labels",
            "use_cache",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
        ],
    ),
    "opt_modeling.OPTForCausalLM": (
        ["config", "weights"],
        [
            "input_ids",
            "attention_mask",
            "head_mask",
            "past_key_values",
            "inputs_embeds",
            "labels",
            "use_cache",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
        ],
    ),
    "flash_gpt2_modeling.FlashGPT2ForCausalLM": (["prefix", "config", "weights"], [*PAGED, "skip_lm_head"]),
    "flash_llama_modeling.FlashLlamaForCausalLM": (
        ["prefix", "config", "weights", "create_layer_fn"],
        [*PAGED, "cross_attention_states", "skip_lm_head"],
    ),
}
NAMES = {
    "neox_modeling": [
        "GPTNeoXPreTrainedModel",
        "GPTNeoXAttention",
        "RotaryEmbedding",
        "GPTNeoXMLP",
        "GPTNeoXLayer",
        "GPTNeoXModel",
    ],
    "opt_modeling": [
        "OPTPreTrainedModel",
        "OPTLearnedPositionalEmbedding",
        "OPTAttention",
        "OPTDecoderLayer",
        "OPTDecoder",
        "OPTModel",
    ],
    "flash_gpt2_modeling": ["FlashGPT2PreTrainedModel", "FlashGPT2Attention", "GPT2MLP", "GPT2Block", "FlashGPT2Model"],
    "flash_llama_modeling": [
        "LlamaConfig",
        "LlamaRMSNorm",
        "FlashLlamaAttention",
        "LlamaMLP",
        "FlashLlamaLayer",
        "FlashLlamaModel",
    ],
}
MODULES = "lorax_server.models.custom_modeling"


@pytest.mark.parametrize("path", list(CONTRACTS))
def test_signatures_match_contract(path: str) -> None:
    module, name = path.split(".")
    result = getattr(import_module(f"{MODULES}.{module}"), name)
    constructor, forward = CONTRACTS[path]
    assert list(inspect.signature(result.__init__).parameters) == ["self", *constructor]
    parameters = list(inspect.signature(result.forward).parameters.values())
    assert parameters[0].name == "self"
    positional = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == forward
    added = [(p.name, p.kind, p.default) for p in parameters[1:] if p.kind is not p.POSITIONAL_OR_KEYWORD]
    padded = path.startswith(("neox", "opt"))
    assert added == ([("adapter_data", inspect.Parameter.KEYWORD_ONLY, None)] if padded else [])


@pytest.mark.parametrize("path", [path for path in CONTRACTS if "flash" in path])
def test_forward_defaults_match_contract(path: str) -> None:
    """The first nine parameters of a paged forward are required, the rest optional."""
    module, name = path.split(".")
    forward = getattr(import_module(f"{MODULES}.{module}"), name).forward
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    assert [p.default for p in parameters[:9]] == [inspect.Parameter.empty] * 9
    assert [p.default for p in parameters[9:]] == [None] * (len(parameters) - 10) + [False]


@pytest.mark.parametrize("module", list(NAMES))
def test_contract_names_are_classes(module: str) -> None:
    result = import_module(f"{MODULES}.{module}")
    assert all(inspect.isclass(getattr(result, name)) for name in NAMES[module])
