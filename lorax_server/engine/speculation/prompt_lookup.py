"""Guesses the next token from earlier text in the same request: the prompt and the completion so far."""

from collections.abc import Sequence

from lorax_server.engine.speculation.guess import MAX_MATCH, Guess, bucket

MAX_PROMPT_TOKENS = 4096  # indexed tokens of a prompt, because indexing delays the first draft by 0.3 us per token
LONG = 3  # tokens; the last occurrence of a shorter text is often in another context
KINDS = 16  # kinds of other guesses have higher numbers


class PromptLookup:
    """Stores the last position of each token, and of each run of `LONG` tokens, in a sequence."""

    def __init__(self, prompt_length: int) -> None:
        self._next = max(0, prompt_length - MAX_PROMPT_TOKENS)  # first position that is not indexed
        self._first = self._next
        self._after_token: dict[int, int] = {}  # position after the last occurrence
        self._after_long: dict[tuple[int, ...], int] = {}

    def update(self, token_ids: Sequence[int]) -> None:
        """Index the tokens, except for the last token, because no token follows it yet."""
        for position in range(max(self._next, self._first + 1), len(token_ids)):
            self._after_token[token_ids[position - 1]] = position
            if position - LONG >= self._first:
                self._after_long[tuple(token_ids[position - LONG : position])] = position
        self._next = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the position of the token that probably comes next, and the length of the match before this position.
        The length is 0 if the last tokens do not occur earlier in the text.
        """
        position = self._after_long.get(tuple(token_ids[-LONG:])) or self._after_token.get(token_ids[-1], 0)
        if not position:
            return 0, 0
        length, longest = 1, min(MAX_MATCH, position - self._first)
        while length < longest and token_ids[-1 - length] == token_ids[position - 1 - length]:
            length += 1
        return position, length

    @staticmethod
    def guess(token_ids: Sequence[int], position: int, length: int) -> Guess:
        return Guess(token_ids[position], bucket(length))
