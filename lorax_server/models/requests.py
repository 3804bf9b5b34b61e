"""What a request's messages say, checked against the model it is for."""

from typing import Any

from lorax_server.errors import InputError
from lorax_server.models.pretrained import max_positions
from lorax_server.types import StopParams


def stop_from_pb(pb: Any, eos_token_ids: frozenset[int]) -> StopParams:
    """From a `StoppingCriteriaParameters`."""
    return StopParams(
        max_new_tokens=pb.max_new_tokens,
        min_new_tokens=pb.min_new_tokens,
        eos_token_ids=eos_token_ids,
        ignore_eos=pb.ignore_eos_token,
        stop_token_ids=frozenset(pb.stop_token_ids),
        stop_strings=tuple(pb.stop_sequences),
        include_stop=not pb.exclude_stop,
    )


def prompt_ids(request: Any, tokenizer: Any) -> list[int]:
    """The ids that a request carries, else those of its text; the last `truncate` of them."""
    if any(chunk.HasField("image") for chunk in request.tokenized_inputs.input_chunks):
        raise InputError(f"request {request.id}: images are not supported")
    ids = list(request.tokenized_inputs.ids) or list(tokenizer(request.inputs)["input_ids"])
    return ids[-request.truncate :] if request.truncate else ids


def check_prompt(request: Any, ids: list[int], max_new_tokens: int, config: Any) -> None:
    """Refuse what the model cannot take. Without a config only an empty prompt is refused."""
    if not ids:
        raise InputError(f"request {request.id}: `inputs` cannot be empty")
    if config is None:
        return
    vocab_size = config.get_text_config(decoder=True).vocab_size
    beyond = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if beyond:
        raise InputError(
            f"request {request.id}: token {beyond[0]} is beyond the model's vocabulary of {vocab_size}; "
            "its tokenizer knows more tokens than the model"
        )
    for entry in request.parameters.logit_bias:  # here it is one request's; in a step it would be the whole batch's
        if entry.token_id >= vocab_size:
            raise InputError(
                f"request {request.id}: `logit_bias`: token {entry.token_id} is beyond the vocabulary of {vocab_size}"
            )
    limit = max_positions(config)
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise InputError(
            f"request {request.id}: `inputs` tokens + `max_new_tokens` must be <= {limit}. "
            f"Given: {len(ids)} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
