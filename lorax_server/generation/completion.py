"""What a script gets: the answer to a prompt, whole or token by token."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lorax_server.errors import LoraxError
from lorax_server.generation.answer import Answer
from lorax_server.types import Alternatives, FinishReason, Output, Request, SampledToken


class Chunk(NamedTuple):
    """What one token added."""

    text: str
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    alternatives: Alternatives | None = None
    offset: int = 0  # where its text begins in that of the answer


@dataclass
class Completion:
    """A prompt's answer."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)  # of each token, if they were asked for
    prompt_logprobs: list[float] | None = None  # from the second token on, if they were asked for
    finish_reason: FinishReason | None = None
    error: LoraxError | None = None
    prompt_alternatives: list[Alternatives] | None = None  # of the same tokens as `prompt_logprobs`


class Run:
    """A request under way."""

    def __init__(self, request: Request, answer: Answer) -> None:
        self.request = request
        self.answer = answer
        self.completion = Completion(list(request.prompt_ids))
        self.chunks: list[Chunk] = []

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason is not None or self.completion.error is not None

    def take(self, output: Output) -> None:
        completion = self.completion
        if output.failure is not None:
            completion.text = self.answer.text
            completion.error = output.failure.to_error()
            return
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs, completion.prompt_alternatives = (
                output.prompt_logprobs,
                output.prompt_alternatives,
            )
        for place, token in enumerate(output.tokens, start=1):
            self._take_token(token, output.finish_reason if place == len(output.tokens) else None)
            if self.is_done:
                return

    def _take_token(self, token: SampledToken, reason: FinishReason | None) -> None:
        completion, offset = self.completion, self.answer.num_characters
        text = self.answer.take(token.token_id)
        completion.token_ids.append(token.token_id)
        completion.logprobs.append(token.logprob)
        if token.alternatives is not None:
            completion.alternatives.append(token.alternatives)
        reason = reason if self.answer.finish_reason is None else self.answer.finish_reason
        self.chunks.append(Chunk(text, token.token_id, token.logprob, reason, token.alternatives, offset))
        if reason is not None:
            completion.text = self.answer.text
            completion.finish_reason = reason  # last: then all is there for who waits on another thread
