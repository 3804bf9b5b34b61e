"""Request fields of other servers that this server does not support, or supports under another name.

Requests with such fields are rejected instead of silently returning a different completion. Other unknown fields are
ignored, and the response header `x-ignored-fields` names them. Sources, as of 2026:

| dialect | source |
|---|---|
| OpenAI | API reference for `/v1/chat/completions` and `/v1/completions` |
| vLLM | `vllm/entrypoints/openai/protocol.py`, and "Extra Parameters" in its documentation |
| SGLang | `sglang/srt/entrypoints/openai/protocol.py`, and "Sampling Parameters" in its documentation |
| llama.cpp | `tools/server/README.md` |
| TGI | `GenerateParameters` and `ChatRequest` in `router/src/lib.rs` |
| LoRAX | the same structs in its `router/src/lib.rs`, before and after `response_format` was added |
| transformers | `GenerationConfig`, whose field names users try on every server |
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from lorax_server.errors import InputError, NotSupportedError

GENERATE, CHAT, COMPLETIONS, RESPONSES = "generate", "chat", "completions", "responses"
OPENAI = (CHAT, COMPLETIONS, RESPONSES)
ALL_ROUTES = (GENERATE, *OPENAI)
POOLING = "pooling"  # all routes for embeddings, classification and scores


class UnsupportedField(NamedTuple):
    """A field that is rejected, with the routes that reject it and the dialects that define it."""

    name: str
    routes: tuple[str, ...]
    dialects: str
    replacement: str = ""  # the equivalent field of this server
    neutral_values: tuple[Any, ...] = ()  # values without effect, in addition to empty values
    zero_is_set: bool = False  # True if 0 is a meaningful value, not an empty value

    def is_set(self, value: Any, fields: Mapping[str, Any]) -> bool:
        """Return True if `value` would change the completion. `fields` are the request's supported fields.

        The field has no effect if its replacement is set to the same value: some clients send the field names of
        several servers. If the default is true, only `false` has an effect.
        """
        if self.replacement and fields.get(self.replacement) is not None and fields[self.replacement] == value:
            return False
        if self.defaults_to_true:
            return value is False
        is_empty = not value and not (self.zero_is_set and value is not False and value == 0)
        return not is_empty and value not in self.neutral_values

    @property
    def defaults_to_true(self) -> bool:
        return any(value is True for value in self.neutral_values)  # not `==`, because 1 == True

    @property
    def reason(self) -> str:
        if self.replacement:
            return f"`{self.name}` is not supported on this route; use `{self.replacement}` instead"
        return f"`{self.name}` is not supported yet; ignoring it would change the output"


def _make_fields(dialects: str, routes: tuple[str, ...], *names: str) -> list[UnsupportedField]:
    return [UnsupportedField(name, routes, dialects) for name in names]


UNSUPPORTED_FIELDS = (
    *_make_fields("LoRAX before `response_format`", (GENERATE,), "schema"),
    *_make_fields("LoRAX, TGI", OPENAI, "parameters", "watermark", "truncate", "return_full_text"),
    *_make_fields("OpenAI", OPENAI, "functions", "audio", "web_search_options"),
    *_make_fields("OpenAI, TGI", (GENERATE, COMPLETIONS), "tools"),
    *_make_fields("OpenAI", (RESPONSES,), "previous_response_id", "conversation", "background", "prompt", "moderation"),
    *_make_fields("OpenAI", (RESPONSES,), "context_management", "messages", "logprobs"),
    *_make_fields("OpenAI, vLLM", ALL_ROUTES, "suffix"),
    *_make_fields("TGI", ALL_ROUTES, "top_n_tokens"),
    *_make_fields("TGI, llama.cpp", ALL_ROUTES, "grammar"),
    *_make_fields(
        "SGLang", ALL_ROUTES, "regex", "ebnf", "custom_logit_processor", "stop_regex", "return_hidden_states"
    ),
    *_make_fields("SGLang", OPENAI, "no_stop_trim"),
    *_make_fields("SGLang, llama.cpp", ALL_ROUTES, "json_schema"),
    *_make_fields("SGLang, vLLM", ALL_ROUTES, "return_token_ids"),
    *_make_fields("vLLM", ALL_ROUTES, "structural_tag", "guided_whitespace_pattern", "use_beam_search", "bad_words"),
    *_make_fields("vLLM", ALL_ROUTES, "allowed_token_ids", "logits_processors", "return_tokens_as_token_ids"),
    *_make_fields("vLLM", OPENAI, "include_stop_str_in_output", "truncate_prompt_tokens", "prompt_embeds"),
    *_make_fields("vLLM", (CHAT, RESPONSES), "chat_template", "continue_final_message", "add_special_tokens", "echo"),
    *_make_fields("vLLM", (GENERATE,), "stop_token_ids"),
    *_make_fields(
        "llama.cpp", ALL_ROUTES, "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "samplers"
    ),
    *_make_fields("transformers", ALL_ROUTES, "no_repeat_ngram_size", "penalty_alpha", "bad_words_ids"),
    *_make_fields("transformers", ALL_ROUTES, "max_length", "max_time", "min_length"),
    # Fields with another name on this server, or with values that have no effect.
    UnsupportedField("function_call", OPENAI, "OpenAI", neutral_values=("none", "auto")),
    UnsupportedField("modalities", OPENAI, "OpenAI", neutral_values=(["text"],)),
    UnsupportedField("num_beams", ALL_ROUTES, "transformers", neutral_values=(1,)),
    UnsupportedField("num_return_sequences", ALL_ROUTES, "transformers", neutral_values=(1,)),
    UnsupportedField("n", (GENERATE,), "OpenAI", neutral_values=(1,)),
    UnsupportedField("top_n_sigma", ALL_ROUTES, "llama.cpp", neutral_values=(-1,)),
    UnsupportedField("repeat_penalty", ALL_ROUTES, "llama.cpp", "repetition_penalty", neutral_values=(1,)),
    UnsupportedField("best_of", (CHAT, RESPONSES), "vLLM", neutral_values=(1,)),
    UnsupportedField("do_sample", OPENAI, "TGI, transformers", "temperature", neutral_values=(True,)),
    UnsupportedField("logprobs", (GENERATE,), "OpenAI", "details"),
    UnsupportedField("top_logprobs", (GENERATE,), "OpenAI", "return_k_alternatives"),
    UnsupportedField("max_new_tokens", (CHAT, COMPLETIONS), "LoRAX, TGI", "max_tokens"),
    UnsupportedField("max_new_tokens", (RESPONSES,), "LoRAX, TGI", "max_output_tokens"),
    UnsupportedField("max_completion_tokens", (RESPONSES,), "OpenAI", "max_output_tokens"),
    UnsupportedField("max_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    UnsupportedField("max_completion_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    UnsupportedField("n_predict", (CHAT, COMPLETIONS), "llama.cpp", "max_tokens", neutral_values=(-1,)),
    UnsupportedField("n_predict", (RESPONSES,), "llama.cpp", "max_output_tokens", neutral_values=(-1,)),
    UnsupportedField("n_predict", (GENERATE,), "llama.cpp", "max_new_tokens", neutral_values=(-1,)),
    UnsupportedField("min_new_tokens", OPENAI, "transformers, SGLang", "min_tokens"),
    UnsupportedField("min_tokens", (GENERATE,), "vLLM", "min_new_tokens"),
    UnsupportedField("ignore_eos", (GENERATE,), "vLLM", "ignore_eos_token"),
    UnsupportedField("stop_sequences", ALL_ROUTES, "TGI's clients", "stop"),
    UnsupportedField("stop_strings", ALL_ROUTES, "transformers", "stop"),
    UnsupportedField("eos_token_id", ALL_ROUTES, "transformers", zero_is_set=True),
    UnsupportedField("documents", (CHAT, RESPONSES), "vLLM", "chat_template_kwargs"),
    UnsupportedField("echo", (GENERATE,), "OpenAI", "return_full_text"),
    *(
        UnsupportedField(name, (GENERATE,), "vLLM", "response_format")
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    ),
    UnsupportedField("skip_special_tokens", ALL_ROUTES, "vLLM, SGLang", neutral_values=(True,)),
    UnsupportedField("spaces_between_special_tokens", ALL_ROUTES, "vLLM", neutral_values=(True,)),
    UnsupportedField("prompt_logprobs", ALL_ROUTES, "vLLM", zero_is_set=True),
    UnsupportedField("lora_path", (*ALL_ROUTES, POOLING), "SGLang", "adapter_id"),
    UnsupportedField("lora", (*ALL_ROUTES, POOLING), "llama.cpp", "adapter_id"),
    UnsupportedField("models", (GENERATE,), "this server", "adapter_ids"),
    UnsupportedField("adapter_ids", (CHAT, COMPLETIONS), "this server", "models"),
    *_make_fields("this server", (RESPONSES, POOLING), "models", "adapter_ids"),
    UnsupportedField("input_type", (POOLING,), "Cohere", "prompt_name"),
    UnsupportedField("task", (POOLING,), "Jina", "prompt_name"),
    UnsupportedField("truncate_prompt_tokens", (POOLING,), "vLLM", "truncate", neutral_values=(-1,)),
    UnsupportedField("normalize", (POOLING,), "TEI", neutral_values=(True,)),
    *_make_fields("TEI", (POOLING,), "raw_scores"),
    # Fields that some pooling routes have, and other pooling routes reject.
    *_make_fields("OpenAI", (POOLING,), "dimensions"),
    UnsupportedField("encoding_format", (POOLING,), "OpenAI", neutral_values=("float",)),
    *_make_fields("sentence-transformers", (POOLING,), "prompt_name", "prompt", "instruction"),
    *_make_fields("Cohere, Voyage", (POOLING,), "output_dimension", "embedding_types", "max_tokens_per_doc"),
    *_make_fields("vLLM", (POOLING,), "activation", "use_activation", "softmax", "embed_dtype"),
)
FIELDS_BY_ROUTE = {
    route: {field.name: field for field in UNSUPPORTED_FIELDS if route in field.routes}
    for route in (*ALL_ROUTES, POOLING)
}


def reject_unsupported(route: str, unknown: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> list[str]:
    """Raise if an unknown field is set and unsupported. Return the unknown fields that no dialect defines."""
    ignored = []
    for name, value in (unknown or {}).items():
        field = FIELDS_BY_ROUTE[route].get(name)
        if field is None:
            ignored.append(name)
        elif field.is_set(value, fields):
            raise NotSupportedError(field.reason)
    return ignored


def reject_misplaced(unknown: Mapping[str, Any] | None, parameters: Container[str]) -> None:
    """Raise if a field that belongs in `parameters` is at the top level of the body."""
    for name, value in (unknown or {}).items():
        field = FIELDS_BY_ROUTE[GENERATE].get(name)
        if field.is_set(value, {}) if field is not None else name in parameters and bool(value):
            raise InputError(f"`{name}` is not a top-level field; move it into `parameters`")


def describe_unsupported(route: str) -> str:
    """Return a sentence for the route's schema that lists its rejected fields."""
    names = ", ".join(f"`{name}`" for name in sorted(FIELDS_BY_ROUTE[route]))
    return f"Rejected, because ignoring them would change the completion: {names}."
