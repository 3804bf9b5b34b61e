"""Stop rules, which determine when a completion stops and which text is returned."""

from lorax_server.types import FinishReason, StopParams

__all__ = ["FinishReason", "StoppingCriteria", "find_stop_reason"]


def find_stop_reason(token_id: int, num_generated: int, params: StopParams) -> FinishReason | None:
    """Return the finish reason if the last of `num_generated` tokens is an EOS or stop token, otherwise None."""
    if num_generated <= params.min_new_tokens:
        return None
    if token_id in params.eos_token_ids and not params.ignore_eos:
        return FinishReason.EOS_TOKEN
    return FinishReason.STOP_SEQUENCE if token_id in params.stop_token_ids else None


class StoppingCriteria:
    """The stop rules and progress of one request. An instance is called with each token and its text.

    Stop strings may span several tokens. If several stop strings match, the match that ends first is used, so the
    result does not depend on token boundaries. Text that may be the start of a stop string is held back, unless stop
    strings are included in the output.
    """

    def __init__(self, params: StopParams) -> None:
        self.params = params
        self.current_tokens = 0
        self._all_stop_token_ids = params.all_stop_token_ids
        self.new_text = ""  # text that the last token added
        self.finish_reason: FinishReason | None = None
        self._shown: list[str] = []
        self._num_shown = 0  # number of characters in `_shown`
        self._held = ""
        self._matchers = [_StopStringMatcher(text) for text in params.stop_strings]

    @property
    def max_new_tokens(self) -> int:
        return self.params.max_new_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.params.max_new_tokens - self.current_tokens

    @property
    def current_output(self) -> str:
        """The completion text so far, without text that is held back."""
        return "".join(self._shown)

    @property
    def num_characters(self) -> int:
        """The number of characters in the completion, including text that is held back."""
        return self._num_shown + len(self._held)

    def may_end_with(self, token_id: int) -> bool:
        """Return True if the completion may stop at this token regardless of its text.

        Pass `pending_text` to `__call__` in this case.
        """
        return self.params.max_new_tokens <= self.current_tokens + 1 or token_id in self._all_stop_token_ids

    def __call__(self, last_token: int, last_text: str, pending_text: str = "") -> tuple[bool, FinishReason | None]:
        """Append a token and its text. Return True if the completion stops, and the finish reason.

        If this is the last token, `pending_text` is also appended.
        """
        self.current_tokens += 1
        reason = None
        if last_token in self._all_stop_token_ids:
            reason = find_stop_reason(last_token, self.current_tokens, self.params)
        if reason is FinishReason.EOS_TOKEN:
            last_text = ""
        elif reason is FinishReason.STOP_SEQUENCE and not self.params.include_stop:
            last_text = pending_text = ""
        shown_text, stopped = self._append_text(last_text) if self._matchers else (last_text, False)
        if stopped:
            reason = FinishReason.STOP_SEQUENCE
        elif reason is None and self.current_tokens == self.params.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and not stopped:
            more, stopped = self._append_text(pending_text)  # pending text may complete a stop string
            shown_text += more + self._held
            reason = FinishReason.STOP_SEQUENCE if stopped else reason
        self.new_text, self.finish_reason = shown_text, reason
        self._shown.append(shown_text)
        self._num_shown += len(shown_text)
        return reason is not None, reason

    def _append_text(self, text: str) -> tuple[str, bool]:
        """Append text. Return the text that is not held back, and True if a stop string was found."""
        if not self._matchers or self.current_tokens <= self.params.min_new_tokens:
            return text, False
        num_held = len(self._held)
        text = self._held + text
        for end in range(num_held, len(text)):
            matched = max([matcher.append(text[end]) for matcher in self._matchers])
            if matched:
                self._held = ""
                return text[: end + 1 if self.params.include_stop else end + 1 - matched], True
        held = 0 if self.params.include_stop else max(matcher.matched for matcher in self._matchers)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


class _StopStringMatcher:
    """Matches one stop string with the Knuth-Morris-Pratt algorithm, in constant time per character.

    `matched` is the length of the longest prefix of the stop string that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # [i]: length of the longest proper prefix of text[: i + 1] that is also its suffix
        self.fallback = [0] * len(text)
        for i in range(1, len(text)):
            self.fallback[i] = self._longest_match(text[i], self.fallback[i - 1])

    def append(self, character: str) -> int:
        """Append a character. Return the length of the stop string if the text now ends with it, otherwise 0."""
        self.matched = self._longest_match(character, self.matched)
        return self.matched if self.matched == len(self.text) else 0

    def _longest_match(self, character: str, matched: int) -> int:
        while matched and character != self.text[matched]:
            matched = self.fallback[matched - 1]
        return matched + (character == self.text[matched])
