"""Converts a request's engine outputs to text until the completion stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lorax_server.errors import LoraxError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.text.detokenizer import Detokenizer
from lorax_server.types import (
    Alternatives,
    FinishReason,
    Output,
    Pooled,
    Request,
    SampledToken,
    SamplingParams,
    StopParams,
)


class TokenEvent(NamedTuple):
    """A generated token and the text that it added."""

    text: str
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    alternatives: Alternatives | None = None
    offset: int = 0  # character offset of the token in the completion
    skipped: bool = False  # an accepted draft token's step also generated the token before it


@dataclass
class Completion:
    """A completion and its token data."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)  # one entry per token, if requested
    prompt_logprobs: list[float] | None = None  # from the second prompt token on, if requested
    finish_reason: FinishReason | None = None
    error: LoraxError | None = None
    prompt_alternatives: list[Alternatives] | None = None  # for the same tokens as `prompt_logprobs`
    pooled: Pooled | None = None  # the result of a model without text generation
    num_drafted: int = 0  # draft tokens that were verified for this completion
    num_skipped: int = 0  # tokens that needed no step of their own, because a draft token was accepted


class Generation:
    """A request and its completion so far. Stop strings are matched here, because the engine does not decode text."""

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.adapter_id: str | None = None  # the requested name of the adapter; used only by `LLM`
        self.completion = Completion(list(request.prompt_ids))
        self.events: list[TokenEvent] = []  # events that `pop_events` has not returned yet
        self._detokenizer = detokenizer
        self._criteria = StoppingCriteria(request.stop)
        self._prefix, self._read = detokenizer.start(request.prompt_ids)
        self._ids = list(request.prompt_ids[self._prefix :])  # tokens that the next text depends on
        self._shift = self._prefix  # number of dropped tokens before `_ids`

    @property
    def text(self) -> str:
        """The completion text so far, without text that is held back as a possible stop string."""
        return self._criteria.current_output

    @property
    def num_characters(self) -> int:
        """The character offset of the next token. It includes text that is held back as a possible stop string."""
        return self._criteria.num_characters

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason is not None or self.completion.error is not None

    def append_output(self, output: Output) -> None:
        completion = self.completion
        if output.failure is not None:
            completion.text = self.text
            completion.error = output.failure.to_error()
            return
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = output.prompt_logprobs
            completion.prompt_alternatives = output.prompt_alternatives
        if output.pooled is not None:
            completion.pooled, completion.finish_reason = output.pooled, output.finish_reason
            return
        completion.num_drafted += output.num_drafted
        last = len(output.tokens) - 1
        for index, token in enumerate(output.tokens):
            is_skipped = 0 < index <= output.num_accepted
            completion.num_skipped += is_skipped
            self._append_event(token, output.finish_reason if index == last else None, is_skipped)
            if completion.finish_reason is not None:
                return

    def _append_event(self, token: SampledToken, reason: FinishReason | None, is_skipped: bool) -> None:
        completion, criteria = self.completion, self._criteria
        offset = criteria.num_characters
        text = self.append_token(token.token_id)
        completion.logprobs.append(token.logprob)
        if token.alternatives is not None:
            completion.alternatives.append(token.alternatives)
        if criteria.finish_reason is not None:
            reason = criteria.finish_reason
        event = TokenEvent(text, token.token_id, token.logprob, reason, token.alternatives, offset, is_skipped)
        self.events.append(event)
        if reason is not None:
            completion.text = self.text
            completion.finish_reason = reason  # set last, because other threads wait for it

    def append_token(self, token_id: int) -> str:
        """Append a token and return the text that it adds."""
        ids, shift, criteria = self._ids, self._shift, self._criteria
        self.completion.token_ids.append(token_id)
        ids.append(token_id)
        text, prefix, read = self._detokenizer.advance(ids, self._prefix - shift, self._read - shift)
        pending = self._detokenizer.pending(ids, prefix, read) if criteria.may_end_with(token_id) else ""
        criteria(token_id, text, pending)
        self._prefix, self._read = prefix + shift, read + shift
        self._drop_decoded_tokens(prefix)
        return criteria.new_text

    def pop_events(self) -> list[TokenEvent]:
        """Return the token events since the last call."""
        events, self.events = self.events, []
        return events

    def _drop_decoded_tokens(self, count: int) -> None:
        """Drop the first `count` tokens, because the next text does not depend on them.

        Tokens are kept until two thirds can be dropped, because dropping copies the remaining tokens.
        """
        if count > 2 * len(self._ids) // 3:
            del self._ids[:count]
            self._shift += count


def find_token_offsets(detokenizer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """Return the character offset of each token in the decoded text. Special tokens add no text."""
    stop = StopParams(max_new_tokens=max(1, len(ids)))
    starts, generation = [], Generation(Request(0, (), SamplingParams(), stop), detokenizer)
    for token_id in ids:
        starts.append(generation.num_characters)
        generation.append_token(token_id)
    return starts
