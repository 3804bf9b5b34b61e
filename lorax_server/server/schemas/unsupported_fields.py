"""Fields of other servers that would change an answer, and that this server does not have by that name.

They are refused, so that a client does not get an answer to another request than its own. Any other unknown field
changes nothing and is ignored.

Sources, as of 2026:

| dialect | where its fields are listed |
|---|---|
| OpenAI | the API reference of `/v1/chat/completions` and `/v1/completions` |
| vLLM | `vllm/entrypoints/openai/protocol.py`, and "Extra Parameters" of its documents |
| SGLang | `sglang/srt/entrypoints/openai/protocol.py`, and "Sampling Parameters" of its documents |
| llama.cpp | `tools/server/README.md` |
| TGI | `GenerateParameters` and `ChatRequest` of `router/src/lib.rs` |
| LoRAX | the same of its `router/src/lib.rs`, now and before `response_format` |
| transformers | `GenerationConfig`, whose words people use on every server |
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from lorax_server.errors import InputError, NotSupportedError

GENERATE, CHAT, COMPLETIONS, RESPONSES = "generate", "chat", "completions", "responses"
OPENAI = (CHAT, COMPLETIONS, RESPONSES)
EVERYWHERE = (GENERATE, *OPENAI)


class UnsupportedField(NamedTuple):
    """A field that is refused."""

    name: str
    routes: tuple[str, ...]
    dialects: str
    instead: str = ""  # the field of this server that says the same
    usual: tuple[Any, ...] = ()  # values that ask for nothing, besides empty ones
    zero_is_set: bool = False  # 0 is not empty

    def is_set(self, value: Any, fields: Mapping[str, Any]) -> bool:
        """Tell whether a value changes the answer to a request that has these fields of the route's schema.

        Clients that speak to several servers may say the same in several words. Where true is the default, only `false`
        asks for something.
        """
        if self.instead and fields.get(self.instead) is not None and fields[self.instead] == value:
            return False
        if self.defaults_to_true:
            return value is False
        is_empty = not value and not (self.zero_is_set and value is not False and value == 0)
        return not is_empty and value not in self.usual

    @property
    def defaults_to_true(self) -> bool:
        return any(value is True for value in self.usual)  # not by ==, which takes 1 for true

    @property
    def reason(self) -> str:
        if self.instead:
            return f"`{self.name}` is not known here; use `{self.instead}` instead"
        return f"`{self.name}` is not supported yet; without it the answer would not be what you ask for"


def _unsupported(dialects: str, routes: tuple[str, ...], *names: str) -> list[UnsupportedField]:
    return [UnsupportedField(name, routes, dialects) for name in names]


FIELDS = (
    *_unsupported("LoRAX before `response_format`", (GENERATE,), "schema"),
    *_unsupported("LoRAX, TGI", OPENAI, "parameters", "watermark", "truncate", "return_full_text"),
    *_unsupported("OpenAI", OPENAI, "functions", "audio", "web_search_options"),
    *_unsupported("OpenAI, TGI", (GENERATE, COMPLETIONS), "tools"),
    *_unsupported("OpenAI", (RESPONSES,), "previous_response_id", "conversation", "background", "prompt", "moderation"),
    *_unsupported("OpenAI", (RESPONSES,), "context_management", "messages", "logprobs"),
    *_unsupported("OpenAI, vLLM", EVERYWHERE, "suffix"),
    *_unsupported("TGI", EVERYWHERE, "top_n_tokens"),
    *_unsupported("TGI, llama.cpp", EVERYWHERE, "grammar"),
    *_unsupported(
        "SGLang", EVERYWHERE, "regex", "ebnf", "custom_logit_processor", "stop_regex", "return_hidden_states"
    ),
    *_unsupported("SGLang", OPENAI, "no_stop_trim"),
    *_unsupported("SGLang, llama.cpp", EVERYWHERE, "json_schema"),
    *_unsupported("SGLang, vLLM", EVERYWHERE, "return_token_ids"),
    *_unsupported("vLLM", EVERYWHERE, "structural_tag", "guided_whitespace_pattern", "use_beam_search", "bad_words"),
    *_unsupported("vLLM", EVERYWHERE, "allowed_token_ids", "logits_processors", "return_tokens_as_token_ids"),
    *_unsupported("vLLM", OPENAI, "include_stop_str_in_output", "truncate_prompt_tokens", "prompt_embeds"),
    *_unsupported("vLLM", (CHAT, RESPONSES), "chat_template", "continue_final_message", "add_special_tokens", "echo"),
    *_unsupported("vLLM", (GENERATE,), "stop_token_ids"),
    *_unsupported(
        "llama.cpp", EVERYWHERE, "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "samplers"
    ),
    *_unsupported("transformers", EVERYWHERE, "no_repeat_ngram_size", "penalty_alpha", "bad_words_ids"),
    *_unsupported("transformers", EVERYWHERE, "max_length", "max_time", "min_length"),
    # Fields that this server has by another name, or that have values which ask for nothing.
    UnsupportedField("function_call", OPENAI, "OpenAI", usual=("none", "auto")),
    UnsupportedField("modalities", OPENAI, "OpenAI", usual=(["text"],)),
    UnsupportedField("num_beams", EVERYWHERE, "transformers", usual=(1,)),
    UnsupportedField("num_return_sequences", EVERYWHERE, "transformers", usual=(1,)),
    UnsupportedField("n", (GENERATE,), "OpenAI", usual=(1,)),
    UnsupportedField("top_n_sigma", EVERYWHERE, "llama.cpp", usual=(-1,)),
    UnsupportedField("repeat_penalty", EVERYWHERE, "llama.cpp", "repetition_penalty", usual=(1,)),
    UnsupportedField("best_of", (CHAT, RESPONSES), "vLLM", usual=(1,)),
    UnsupportedField("do_sample", OPENAI, "TGI, transformers", "temperature", usual=(True,)),
    UnsupportedField("logprobs", (GENERATE,), "OpenAI", "details"),
    UnsupportedField("top_logprobs", (GENERATE,), "OpenAI", "return_k_alternatives"),
    UnsupportedField("max_new_tokens", (CHAT, COMPLETIONS), "LoRAX, TGI", "max_tokens"),
    UnsupportedField("max_new_tokens", (RESPONSES,), "LoRAX, TGI", "max_output_tokens"),
    UnsupportedField("max_completion_tokens", (RESPONSES,), "OpenAI", "max_output_tokens"),
    UnsupportedField("max_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    UnsupportedField("max_completion_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    UnsupportedField("n_predict", (CHAT, COMPLETIONS), "llama.cpp", "max_tokens", usual=(-1,)),
    UnsupportedField("n_predict", (RESPONSES,), "llama.cpp", "max_output_tokens", usual=(-1,)),
    UnsupportedField("n_predict", (GENERATE,), "llama.cpp", "max_new_tokens", usual=(-1,)),
    UnsupportedField("min_new_tokens", OPENAI, "transformers, SGLang", "min_tokens"),
    UnsupportedField("min_tokens", (GENERATE,), "vLLM", "min_new_tokens"),
    UnsupportedField("ignore_eos", (GENERATE,), "vLLM", "ignore_eos_token"),
    UnsupportedField("stop_sequences", EVERYWHERE, "TGI's clients", "stop"),
    UnsupportedField("stop_strings", EVERYWHERE, "transformers", "stop"),
    UnsupportedField("eos_token_id", EVERYWHERE, "transformers", zero_is_set=True),
    UnsupportedField("documents", (CHAT, RESPONSES), "vLLM", "chat_template_kwargs"),
    UnsupportedField("echo", (GENERATE,), "OpenAI", "return_full_text"),
    *(
        UnsupportedField(name, (GENERATE,), "vLLM", "response_format")
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    ),
    UnsupportedField("skip_special_tokens", EVERYWHERE, "vLLM, SGLang", usual=(True,)),
    UnsupportedField("spaces_between_special_tokens", EVERYWHERE, "vLLM", usual=(True,)),
    UnsupportedField("prompt_logprobs", EVERYWHERE, "vLLM", zero_is_set=True),
    UnsupportedField("lora_path", EVERYWHERE, "SGLang", "adapter_id"),
    UnsupportedField("lora", EVERYWHERE, "llama.cpp", "adapter_id"),
)
BY_ROUTE = {route: {field.name: field for field in FIELDS if route in field.routes} for route in EVERYWHERE}


def reject_unsupported(route: str, unknown: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> None:
    """Refuse the first field that asks for something, of those that the route's schema does not have."""
    for name, value in (unknown or {}).items():
        field = BY_ROUTE[route].get(name)
        if field is not None and field.is_set(value, fields):
            raise NotSupportedError(field.reason)


def reject_misplaced(unknown: Mapping[str, Any] | None, parameters: Container[str]) -> None:
    """Refuse fields beside `parameters` that LoRAX's routes have in it."""
    for name, value in (unknown or {}).items():
        field = BY_ROUTE[GENERATE].get(name)
        if field.is_set(value, {}) if field is not None else name in parameters and bool(value):
            raise InputError(f"`{name}` is not known beside `inputs`; what is asked for belongs into `parameters`")


def describe_unsupported(route: str) -> str:
    """Write a sentence for the route's schema."""
    names = ", ".join(f"`{name}`" for name in sorted(BY_ROUTE[route]))
    return f"Refused, because the answer would be another one: {names}."
