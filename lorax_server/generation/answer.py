"""One request's tokens become its text."""

from collections.abc import Sequence

from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.text.detokenizer import Detokenizer
from lorax_server.types import FinishReason, StopParams


class Answer:
    """Fed with each token; knows the text so far and whether it has ended, which a stop string decides here."""

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int], stop: StopParams) -> None:
        self._detokenizer = detokenizer
        self._criteria = StoppingCriteria(stop)
        self._prefix, self._read = detokenizer.start(prompt_ids)
        self._ids = list(prompt_ids[self._prefix :])  # what text is made of; `_shift` tokens before are done with
        self._shift = self._prefix
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        return self._criteria.current_output

    @property
    def num_characters(self) -> int:
        """Find where in the text the next token begins, also while the text before it is held back."""
        return self._criteria.num_characters

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._criteria.finish_reason

    def take(self, token_id: int) -> str:
        """The text that a token adds."""
        self.token_ids.append(token_id)
        self._ids.append(token_id)
        prefix, read = self._prefix - self._shift, self._read - self._shift
        progress = self._detokenizer.advance(self._ids, prefix, read)
        pending = ""
        if self._criteria.may_end_with(token_id):
            pending = self._detokenizer.pending(self._ids, progress.prefix_offset, progress.read_offset)
        self._criteria(token_id, progress.text, pending)
        self._prefix, self._read = progress.prefix_offset + self._shift, progress.read_offset + self._shift
        self._forget(progress.prefix_offset)
        return self._criteria.new_text

    def _forget(self, count: int) -> None:
        """Tokens that no text depends on any more; every now and then, since it takes the time of all that stay."""
        if count > 2 * len(self._ids) // 3:
            del self._ids[:count]
            self._shift += count


def locate_tokens(detokenizer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """Find where in the text that tokens make each of them begins; those that are not shown take no room."""
    starts, answer = [], Answer(detokenizer, (), StopParams(max_new_tokens=max(1, len(ids))))
    for token_id in ids:
        starts.append(answer.num_characters)
        answer.take(token_id)
    return starts
