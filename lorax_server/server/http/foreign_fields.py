"""Fields of other servers that would change an answer, and that are not there by that name: they are refused, so that
nobody gets an answer that is not what was asked for. Any other field that is not known changes nothing, and is ignored.

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

GENERATE, CHAT, COMPLETIONS = "generate", "chat", "completions"
OPENAI = (CHAT, COMPLETIONS)
EVERYWHERE = (GENERATE, *OPENAI)


class Foreign(NamedTuple):
    """One field. `instead` is what says the same here. `usual` are values that ask for nothing, besides empty ones; of
    some fields 0 is not empty."""

    name: str
    routes: tuple[str, ...]
    dialects: str
    instead: str = ""
    usual: tuple[Any, ...] = ()
    zero_asks: bool = False

    def asks(self, value: Any, given: Mapping[str, Any]) -> bool:
        """Tell whether the value changes anything, beside what else is given. What is true unless it is said to be
        false asks by `false` alone. Clients that speak to several servers may say the same in several words."""
        if self.instead and given.get(self.instead) is not None and given[self.instead] == value:
            return False
        if self.is_on:
            return value is False
        is_empty = not value and not (self.zero_asks and value is not False and value == 0)
        return not is_empty and value not in self.usual

    @property
    def is_on(self) -> bool:
        """Tell whether it is true unless it is said to be false."""
        return any(value is True for value in self.usual)  # not by ==, which takes 1 for true

    @property
    def reason(self) -> str:
        if self.instead:
            return f"`{self.name}` is not known here; use `{self.instead}` instead"
        return f"`{self.name}` is not supported yet; without it the answer would not be what you ask for"


FOREIGN = (
    # Structured output.
    Foreign("grammar", EVERYWHERE, "TGI, llama.cpp"),
    Foreign("schema", (GENERATE,), "LoRAX before `response_format`"),
    Foreign("json_schema", EVERYWHERE, "SGLang, llama.cpp"),
    Foreign("regex", EVERYWHERE, "SGLang"),
    Foreign("ebnf", EVERYWHERE, "SGLang"),
    Foreign("structural_tag", EVERYWHERE, "vLLM"),
    Foreign("guided_json", EVERYWHERE, "vLLM"),
    Foreign("guided_regex", EVERYWHERE, "vLLM"),
    Foreign("guided_choice", EVERYWHERE, "vLLM"),
    Foreign("guided_grammar", EVERYWHERE, "vLLM"),
    Foreign("structured_outputs", EVERYWHERE, "vLLM"),
    # Tools, and answers that are not text.
    Foreign("tools", (GENERATE, COMPLETIONS), "OpenAI, TGI"),
    Foreign("functions", OPENAI, "OpenAI"),
    Foreign("function_call", OPENAI, "OpenAI", usual=("none", "auto")),
    Foreign("modalities", OPENAI, "OpenAI", usual=(["text"],)),
    Foreign("audio", OPENAI, "OpenAI"),
    Foreign("web_search_options", OPENAI, "OpenAI"),
    # How tokens are chosen.
    Foreign("use_beam_search", EVERYWHERE, "vLLM"),
    Foreign("num_beams", EVERYWHERE, "transformers", usual=(1,)),
    Foreign("num_return_sequences", EVERYWHERE, "transformers", usual=(1,)),
    Foreign("n", (GENERATE,), "OpenAI", usual=(1,)),
    Foreign("no_repeat_ngram_size", EVERYWHERE, "transformers"),
    Foreign("penalty_alpha", EVERYWHERE, "transformers"),
    Foreign("bad_words_ids", EVERYWHERE, "transformers"),
    Foreign("bad_words", EVERYWHERE, "vLLM"),
    Foreign("allowed_token_ids", EVERYWHERE, "vLLM"),
    Foreign("logits_processors", EVERYWHERE, "vLLM"),
    Foreign("custom_logit_processor", EVERYWHERE, "SGLang"),
    Foreign("mirostat", EVERYWHERE, "llama.cpp"),
    Foreign("dry_multiplier", EVERYWHERE, "llama.cpp"),
    Foreign("xtc_probability", EVERYWHERE, "llama.cpp"),
    Foreign("dynatemp_range", EVERYWHERE, "llama.cpp"),
    Foreign("top_n_sigma", EVERYWHERE, "llama.cpp", usual=(-1,)),
    Foreign("samplers", EVERYWHERE, "llama.cpp"),
    Foreign("repeat_penalty", EVERYWHERE, "llama.cpp", "repetition_penalty", usual=(1,)),
    Foreign("best_of", (CHAT,), "vLLM", usual=(1,)),
    Foreign("do_sample", OPENAI, "TGI, transformers", "temperature", usual=(True,)),
    Foreign("watermark", OPENAI, "TGI, LoRAX"),
    Foreign("logprobs", (GENERATE,), "OpenAI", "details"),
    Foreign("top_logprobs", (GENERATE,), "OpenAI", "return_k_alternatives"),
    Foreign("top_n_tokens", EVERYWHERE, "TGI"),
    # Where an answer ends.
    Foreign("max_new_tokens", OPENAI, "LoRAX, TGI", "max_tokens"),
    Foreign("max_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    Foreign("max_completion_tokens", (GENERATE,), "OpenAI", "max_new_tokens"),
    Foreign("n_predict", OPENAI, "llama.cpp", "max_tokens", usual=(-1,)),
    Foreign("n_predict", (GENERATE,), "llama.cpp", "max_new_tokens", usual=(-1,)),
    Foreign("max_length", EVERYWHERE, "transformers"),
    Foreign("max_time", EVERYWHERE, "transformers"),
    Foreign("min_length", EVERYWHERE, "transformers"),
    Foreign("min_new_tokens", OPENAI, "transformers, SGLang", "min_tokens"),
    Foreign("min_tokens", (GENERATE,), "vLLM", "min_new_tokens"),
    Foreign("ignore_eos", (GENERATE,), "vLLM", "ignore_eos_token"),
    Foreign("stop_sequences", EVERYWHERE, "TGI's clients", "stop"),
    Foreign("stop_strings", EVERYWHERE, "transformers", "stop"),
    Foreign("stop_regex", EVERYWHERE, "SGLang"),
    Foreign("stop_token_ids", (GENERATE,), "vLLM"),
    Foreign("eos_token_id", EVERYWHERE, "transformers", zero_asks=True),
    Foreign("no_stop_trim", OPENAI, "SGLang"),
    Foreign("include_stop_str_in_output", OPENAI, "vLLM"),
    # The prompt.
    Foreign("parameters", OPENAI, "LoRAX, TGI"),
    Foreign("chat_template", (CHAT,), "vLLM"),
    Foreign("continue_final_message", (CHAT,), "vLLM"),
    Foreign("documents", (CHAT,), "vLLM", "chat_template_kwargs"),
    Foreign("add_special_tokens", (CHAT,), "vLLM"),
    Foreign("truncate_prompt_tokens", OPENAI, "vLLM"),
    Foreign("truncate", OPENAI, "TGI, LoRAX"),
    Foreign("prompt_embeds", OPENAI, "vLLM"),
    Foreign("suffix", EVERYWHERE, "OpenAI, vLLM"),
    # What of it is told.
    Foreign("echo", (CHAT,), "vLLM"),
    Foreign("echo", (GENERATE,), "OpenAI", "return_full_text"),
    Foreign("return_full_text", OPENAI, "TGI, LoRAX"),
    Foreign("skip_special_tokens", EVERYWHERE, "vLLM, SGLang", usual=(True,)),
    Foreign("spaces_between_special_tokens", EVERYWHERE, "vLLM", usual=(True,)),
    Foreign("prompt_logprobs", EVERYWHERE, "vLLM", zero_asks=True),
    Foreign("return_token_ids", EVERYWHERE, "vLLM, SGLang"),
    Foreign("return_tokens_as_token_ids", EVERYWHERE, "vLLM"),
    Foreign("return_hidden_states", EVERYWHERE, "SGLang"),
    # Adapters.
    Foreign("lora_path", EVERYWHERE, "SGLang", "adapter_id"),
    Foreign("lora", EVERYWHERE, "llama.cpp", "adapter_id"),
)
BY_ROUTE = {route: {field.name: field for field in FOREIGN if route in field.routes} for route in EVERYWHERE}


def refuse_foreign(route: str, unknown: Mapping[str, Any] | None, given: Mapping[str, Any]) -> None:
    """Refuse the first field that asks for something. `unknown` are those that the route's schema does not have, and
    `given` those that it has."""
    for name, value in (unknown or {}).items():
        field = BY_ROUTE[route].get(name)
        if field is not None and field.asks(value, given):
            raise NotSupportedError(field.reason)


def refuse_misplaced(unknown: Mapping[str, Any] | None, parameters: Container[str]) -> None:
    """Refuse what LoRAX's routes want in `parameters` and find beside it."""
    for name, value in (unknown or {}).items():
        field = BY_ROUTE[GENERATE].get(name)
        if field.asks(value, {}) if field is not None else name in parameters and bool(value):
            raise InputError(f"`{name}` is not known beside `inputs`; what is asked for belongs into `parameters`")


def describe_refused(route: str) -> str:
    """A sentence for the route's schema."""
    names = ", ".join(f"`{name}`" for name in sorted(BY_ROUTE[route]))
    return f"Refused, because the answer would be another one: {names}."
