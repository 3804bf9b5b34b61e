"""Convert protobuf requests to prompts and parameters, and check them against the model's limits."""

from typing import Any

from lorax_server.errors import AdapterError, InputError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.models.contract.next_token_chooser import NextTokenChooser
from lorax_server.models.pretrained import eos_token_ids, max_positions, resolve_pad_token
from lorax_server.text.detokenizer import special_tokens
from lorax_server.types import StopParams

BASE_MODEL_IDS = ("", "__base_model__")


def stop_from_pb(pb: Any, tokenizer: Any, config: Any) -> StopParams:
    """Return a `StoppingCriteriaParameters` message as `StopParams`.

    Stop sequences that are special tokens become stop token IDs.
    """
    special = special_tokens(tokenizer) if pb.stop_sequences else {}
    special_ids = frozenset(special[text] for text in pb.stop_sequences if text in special)
    return StopParams(
        max_new_tokens=pb.max_new_tokens,
        min_new_tokens=pb.min_new_tokens,
        eos_token_ids=eos_token_ids(tokenizer, config),
        ignore_eos=pb.ignore_eos_token,
        stop_token_ids=special_ids.union(pb.stop_token_ids),
        stop_strings=tuple(pb.stop_sequences),
        include_stop=not pb.exclude_stop,
    )


def prompt_ids(request: Any, tokenizer: Any) -> list[int]:
    """Return the prompt's token IDs, truncated to the last `truncate` tokens."""
    ids = list(request.tokenized_inputs.ids)
    if not ids and not request.inputs:
        raise InputError("`inputs` cannot be empty")  # although the tokenizer may add a BOS token
    ids = ids or list(tokenizer(request.inputs)["input_ids"])
    if not ids:
        raise InputError("`inputs` cannot be empty: the text has no tokens")
    return ids[-request.truncate :] if request.truncate else ids


def parse_request(request: Any, tokenizer: Any, config: Any) -> tuple[list[int], NextTokenChooser, StoppingCriteria]:
    """Return a request's prompt token IDs, sampling parameters and stopping criteria. Reject invalid requests."""
    check_supported(request)
    stop = stop_from_pb(request.stopping_parameters, tokenizer, config)
    ids = prompt_ids(request, tokenizer)
    if config is not None:
        check_limits(ids, stop, request.parameters.logit_bias, config)
    return ids, NextTokenChooser.from_pb(request.parameters, stop, len(ids)), StoppingCriteria(stop)


def find_pad_token(tokenizer: Any, config: Any) -> int:
    """Return the padding token ID. Without a config, any token is allowed, because padding is masked."""
    if config is not None:
        return resolve_pad_token(tokenizer, config, config.get_text_config(decoder=True).vocab_size)
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def check_supported(request: Any) -> None:
    """Reject requests with features that padded batches do not support."""
    if request.parameters.adapter_id not in BASE_MODEL_IDS and request.adapter_index == 0:
        raise AdapterError(f"adapter {request.parameters.adapter_id!r} is not loaded")
    if request.tokenized_inputs.input_chunks:
        raise InputError("images and other input chunks are not supported: send `inputs` or token IDs")
    if request.cache_len or request.chunk_len:
        raise InputError("cached prefixes and chunked prefill are not supported in padded batches")


def check_limits(ids: list[int], stop: StopParams, logit_bias: Any, config: Any) -> None:
    """Reject requests that exceed the model's limits, because an error during a step fails the whole batch."""
    vocab_size = config.get_text_config(decoder=True).vocab_size
    beyond = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if beyond:
        raise InputError(
            f"token ID {beyond[0]} is outside the model's vocabulary of {vocab_size} tokens; "
            "the tokenizer has more tokens than the model"
        )
    for entry in logit_bias:
        if entry.token_id >= vocab_size:
            raise InputError(
                f"`logit_bias`: token ID {entry.token_id} is outside the vocabulary of {vocab_size} tokens"
            )
    if stop.min_new_tokens and stop.all_stop_token_ids.issuperset(range(vocab_size)):
        raise InputError("`min_new_tokens`: every token in the vocabulary is a stop token")
    limit = max_positions(config)
    if len(ids) + stop.max_new_tokens > limit:
        raise InputError(
            f"`inputs` tokens + `max_new_tokens` must be <= {limit}. "
            f"Given: {len(ids)} `inputs` tokens and {stop.max_new_tokens} `max_new_tokens`"
        )
