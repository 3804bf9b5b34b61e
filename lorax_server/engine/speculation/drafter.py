"""Proposes draft tokens for each sequence if they are likely to save time."""

from collections.abc import Iterator

from lorax_server.engine.sequence import Sequence
from lorax_server.engine.speculation.completion_index import ORDERS, AdapterHistory, Histories
from lorax_server.engine.speculation.guess import Guess
from lorax_server.engine.speculation.prompt_lookup import PromptLookup
from lorax_server.engine.speculation.step_costs import StepCosts

MIN_GAIN = 1.1  # expected speedup below which no tokens are drafted, because drafts have costs outside the model
RETRY_TOKENS = 16  # tokens between attempts of a sequence without drafts, if several steps are in flight


class _SequenceState:
    """A sequence's last guesses."""

    def __init__(self, sequence: Sequence, history: AdapterHistory) -> None:
        self.history = history
        self.lookup = PromptLookup(len(sequence.request.prompt_ids))
        self.first = 0  # position of the first guessed token
        self.guesses: list[Guess] = []
        self.next_try = 0  # sequence length from which the sequence may wait for its token in flight

    def check_guesses(self, token_ids: list[int]) -> None:
        """Record which of the last guesses were correct, and start new guesses after these tokens."""
        for guess, token_id in zip(self.guesses, token_ids[self.first :], strict=False):
            self.history.accuracy.record(guess.kind, guess.token_id == token_id)
            if guess.token_id != token_id:
                break
        self.first, self.guesses = len(token_ids), []


class SpeculativeDrafter:
    """Guesses tokens from the request's own text, and from earlier completions of the same adapter and tenant.

    The number of draft tokens depends on the accuracy of earlier guesses of the same kind, and on the measured cost of
    a token relative to a step. It does not depend on the texts of other tenants.
    """

    def __init__(
        self,
        max_tokens: int,
        max_batch_size: int | None = None,
        histories: Histories | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        """Propose at most `max_tokens` tokens per sequence, and no tokens if more than `max_batch_size` sequences are
        running.
        """
        self._max_tokens = max_tokens
        self._max_batch_size = max_batch_size
        self._histories = histories or Histories()
        self._costs = costs or StepCosts()
        self._states: dict[Sequence, _SequenceState] = {}
        self._is_paused = False  # drafts cannot pay off for the number of sequences in the last step

    @property
    def num_sequences(self) -> int:
        """The number of sequences with state."""
        return len(self._states)

    def propose(self, sequence: Sequence, num_running: int) -> list[int]:
        """Return draft tokens for the positions after the sequence's last token, or no tokens."""
        if not self._may_pay_off(num_running) or self._costs.must_measure_plain:
            return []
        if sequence not in self._states:
            self._states[sequence] = _SequenceState(sequence, self._find_history(sequence))
        return self._make_draft(sequence, num_running)

    def _make_draft(self, sequence: Sequence, num_running: int) -> list[int]:
        """Return the draft after the sequence's tokens in flight, or no tokens if it would not save time.

        Guesses for tokens in flight are assumed to be correct.
        """
        plain, overhead = self._costs.in_draft_tokens(num_running)
        state, num_in_flight = self._states[sequence], sequence.num_in_flight
        state.check_guesses(sequence.token_ids)
        draft = list[int]()
        probability = 1.0  # that the draft so far is correct
        expected = 1.0  # number of tokens that the step yields
        for guess, likely in self._guess_tokens(sequence):
            state.guesses.append(guess)
            if len(state.guesses) <= num_in_flight:
                continue
            probability *= likely
            if probability * (plain + overhead + len(draft)) < expected:
                break  # the token's costs exceed its benefit
            expected += probability
            draft.append(guess.token_id)
            if len(draft) == self._max_tokens:
                break
        speedup = expected * plain / (plain + overhead + len(draft))
        if speedup < MIN_GAIN:
            state.next_try = len(sequence.token_ids) + num_in_flight + RETRY_TOKENS
            return []
        return draft

    def _guess_tokens(self, sequence: Sequence) -> Iterator[tuple[Guess, float]]:
        """Yield guesses for the tokens after the sequence's last known token. Each guess has the probability that it is
        correct if all previous guesses are correct.
        """
        state, token_ids = self._states[sequence], sequence.token_ids
        completions, accuracy = state.history
        state.lookup.update(token_ids)
        context = token_ids[-max(ORDERS) :]
        position, length = state.lookup.find(token_ids)
        while True:
            guess = completions.guess(context)
            likely = accuracy.estimate(guess.kind) if guess is not None else 0.0
            if position:
                copied = state.lookup.guess(token_ids, position, length)
                if (copied_likely := accuracy.estimate(copied.kind)) >= likely:
                    guess, likely = copied, copied_likely
            if guess is None:
                return
            yield guess, likely
            context.append(guess.token_id)
            is_copy = position and token_ids[position] == guess.token_id
            position = position + 1 if is_copy and position + 1 < len(token_ids) else 0
            length += 1

    def waits(self, sequence: Sequence, num_running: int) -> bool:
        """Return True if a sequence must wait for its token in flight, because it is likely to get a draft.

        A sequence that waits is missing from the next step, which other sequences use. After a failed attempt, it
        therefore waits only if a draft is likely after a guess for the token in flight.
        """
        if self._is_paused or self._costs.must_measure_plain:
            return False
        state = self._states.get(sequence)
        if state is None:
            return True
        if len(sequence.token_ids) + sequence.num_in_flight < state.next_try:
            return False
        return bool(self._make_draft(sequence, num_running))

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a step in which every sequence decodes."""
        self._costs.record(num_sequences, num_drafted, seconds)
        self._is_paused = not self._may_pay_off(num_sequences)

    def finish(self, sequence: Sequence) -> None:
        """Index a finished completion."""
        state, request = self._states.pop(sequence, None), sequence.request
        if sequence.num_generated > 0:
            history = self._find_history(sequence) if state is None else state.history
            history.completions.add(sequence.token_ids, len(request.prompt_ids))
            self._histories.keep(request.tenant, (request.adapter_identity, request.salt), history)

    def _find_history(self, sequence: Sequence) -> AdapterHistory:
        request = sequence.request
        return self._histories.find(request.tenant, (request.adapter_identity, request.salt))

    def _may_pay_off(self, num_sequences: int) -> bool:
        """Return True if drafts would save time if all their tokens were correct."""
        if self._max_batch_size is not None and num_sequences > self._max_batch_size:
            return False
        plain, overhead = self._costs.in_draft_tokens(num_sequences)
        return (1 + self._max_tokens) * plain >= MIN_GAIN * (plain + overhead + self._max_tokens)
