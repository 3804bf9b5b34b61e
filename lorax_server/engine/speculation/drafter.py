"""Proposes draft tokens for all sequences of a batch if they are likely to save time."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from typing import NamedTuple

from lorax_server.engine.sequence import Sequence
from lorax_server.engine.speculation.completion_index import ORDERS, AdapterHistory, Histories
from lorax_server.engine.speculation.guess import Accuracy, Guess
from lorax_server.engine.speculation.head_trial import HeadTrial
from lorax_server.engine.speculation.prompt_lookup import KINDS, PromptLookup
from lorax_server.engine.speculation.step_costs import StepCosts

MIN_GAIN = 1.05  # expected speedup below which no tokens are drafted, because estimates are not exact
MIN_PROBABILITY = 0.05  # drafts end before tokens that are less likely, because planning them takes time
HEAD_KINDS = KINDS + 8 * len(ORDERS)  # guesses of draft heads: one kind per head
# Sequences whose last guesses are checked before new guesses. In larger batches, this would take too long.
MAX_CHECKED_FIRST = 16
MAX_LEARNED_TOKENS = 256  # completion tokens indexed per step, because indexing takes about 3 us per token
# Finished completions that wait to be indexed. If completions finish faster than `learn` indexes them, the oldest are
# not indexed, because the list would grow without limit.
MAX_UNINDEXED = 256
MAX_FAILURES = 8  # attempts in a row without draft tokens; after more of them, a sequence is tried less often
MAX_RETRY_STEPS = 16  # maximum number of steps until the next attempt


class _UncheckedGuesses(NamedTuple):
    """Guesses, and the tokens that were generated at their positions."""

    accuracy: Accuracy
    guesses: list[Guess]
    token_ids: list[int]
    num_drafted: int  # leading guesses that were used as draft tokens

    def record(self) -> int:
        """Record which guesses were correct. Return the number of correct draft tokens that draft heads guessed."""
        num_from_heads = 0
        for number, (guess, token_id) in enumerate(zip(self.guesses, self.token_ids, strict=False)):
            guessed_id, kind = guess
            self.accuracy.record(kind, guessed_id == token_id)
            if guessed_id != token_id:
                break
            num_from_heads += number < self.num_drafted and kind >= HEAD_KINDS
        return num_from_heads


class _SequenceState:
    """A sequence's last guesses."""

    def __init__(self, sequence: Sequence, history: AdapterHistory) -> None:
        self.history = history
        self.lookup = PromptLookup(len(sequence.request.prompt_ids))
        self.first = 0  # position of the first guessed token
        self.guesses: list[Guess] = []
        self.num_drafted = 0  # leading guesses that were used as draft tokens
        self.num_failures = 0  # consecutive attempts without draft tokens
        self.next_attempt = 0  # number of tokens before the next attempt

    def record_attempt(self, num_tokens: int, *, has_draft: bool) -> None:
        """Record whether the sequence got draft tokens. After several failures, wait before the next attempt."""
        self.num_failures = 0 if has_draft else self.num_failures + 1
        if self.num_failures > MAX_FAILURES:
            self.next_attempt = num_tokens + min(2 ** (self.num_failures - MAX_FAILURES), MAX_RETRY_STEPS)

    def start_guesses(self, token_ids: list[int]) -> _UncheckedGuesses:
        """Start new guesses after these tokens. Return the last guesses, with the tokens that followed them."""
        token_ids_since = token_ids[self.first :]
        unchecked = _UncheckedGuesses(self.history.accuracy, self.guesses, token_ids_since, self.num_drafted)
        self.first, self.guesses, self.num_drafted = len(token_ids), [], 0
        return unchecked


class SpeculativeDrafter:
    """Guesses tokens from the request's own text, from earlier completions of the same adapter and tenant, and with
    draft heads.

    The number of draft tokens is chosen for the whole batch, so that the expected number of tokens per second is
    maximal. It depends on the accuracy of earlier guesses of the same kind, and on measured step times. Guesses and
    their accuracy do not depend on the texts of other tenants.

    `propose` delays the next step, so it does as little as possible. `learn` does the remaining work, such as indexing
    finished completions, while the step runs.
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
        self._head_trial = HeadTrial()
        self._states: dict[Sequence, _SequenceState] = {}
        self._unchecked: list[_UncheckedGuesses] = []
        self._finished: deque[tuple[Sequence, AdapterHistory]] = deque(maxlen=MAX_UNINDEXED)  # completions to index
        self._speedup = MIN_GAIN  # expected speedup of the last drafts
        self._retry_steps = 1  # steps until the next attempt if `waits` finds no drafts
        self._num_skipped = 0  # calls of `waits` since the last attempt

    @property
    def num_sequences(self) -> int:
        """The number of sequences with state."""
        return len(self._states)

    def must_run_heads(self, num_running: int) -> bool:
        """Return True if the next step should run the draft heads. This counts steps, so call it once per step."""
        is_small = self._max_batch_size is None or num_running <= self._max_batch_size
        return is_small and self._head_trial.start_step(num_running)

    def propose(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> dict[Sequence, list[int]]:
        """Return draft tokens for the positions after the sequences' last tokens, at most `max_tokens` in total."""
        drafts = self._plan(sequences, num_running, max_tokens)
        if drafts:
            self._retry_steps = 1
        for sequence, draft in drafts.items():
            self._states[sequence].num_drafted = len(draft)
        return drafts

    def waits(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> bool:
        """Return True if the next step should wait for the tokens in flight, because drafts are likely to save time.

        After failed attempts, do not try again for some steps, because each attempt takes time.
        """
        if self._costs.must_measure_plain(num_running, self._speedup):
            return False
        if self._num_skipped + 1 < self._retry_steps:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        self._retry_steps = min(2 * self._retry_steps, MAX_RETRY_STEPS)
        return bool(self._plan(sequences, num_running, max_tokens))

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a step in which every sequence decodes."""
        self._costs.record(num_sequences, num_drafted, seconds)

    def finish(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence. `learn` indexes its completion."""
        self._retry_steps = 1  # the next sequence may be more predictable
        state = self._states.pop(sequence, None)
        if sequence.num_generated > 0:
            self._finished.append((sequence, self._find_history(sequence) if state is None else state.history))

    def learn(self) -> None:
        """Check the last guesses, and index finished completions. Call this once per step, after its submission."""
        self._check_guesses()
        num_tokens = 0
        while self._finished and num_tokens < MAX_LEARNED_TOKENS:
            sequence, history = self._finished.popleft()
            request = sequence.request
            history.completions.add(sequence.token_ids, len(request.prompt_ids))
            self._histories.keep(request.tenant, (request.adapter_identity, request.salt), history)
            num_tokens += sequence.num_generated

    def _plan(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> dict[Sequence, list[int]]:
        """Return the drafts with the highest expected number of tokens per second, or no drafts.

        The most likely tokens are drafted first. Every step size is a candidate.
        """
        if self._max_batch_size is not None and num_running > self._max_batch_size:
            return {}
        max_tokens = min(max_tokens, num_running * self._max_tokens)
        if max_tokens <= 0 or self._costs.must_measure_plain(num_running, self._speedup):
            return {}
        plain_s, sizes = self._costs.estimate(num_running, num_running + max_tokens)
        plain_rate = num_running / plain_s
        min_rate = MIN_GAIN * plain_rate
        if all(size <= min_rate * seconds for size, seconds in sizes):
            return {}  # drafts would not save time if all their tokens were correct
        tried = [each for each in sequences if self._find_state(each).next_attempt <= len(each.token_ids)]
        tokens = self._guess_all(tried, max_tokens)
        tokens.sort(reverse=True)
        expected = list(accumulate([likely for likely, _ in tokens], initial=float(num_running)))
        best_rate, num_best = min_rate, 0
        for size, seconds in sizes:
            count = min(size - num_running, len(tokens))
            if expected[count] > best_rate * seconds:
                best_rate, num_best = expected[count] / seconds, count
            if count == len(tokens):
                break
        self._speedup = best_rate / plain_rate
        counts, drafts = Counter([index for _, index in tokens[:num_best]]), dict[Sequence, list[int]]()
        for index, sequence in enumerate(tried):
            state, count = self._states[sequence], counts[index]
            state.record_attempt(len(sequence.token_ids), has_draft=count > 0)
            if count:
                first = sequence.num_in_flight
                drafts[sequence] = [guess.token_id for guess in state.guesses[first : first + count]]
        return drafts

    def _guess_all(self, sequences: list[Sequence], max_tokens: int) -> list[tuple[float, int]]:
        """Guess tokens for all sequences, and return the probability and the sequence's index for each draft token.

        Unlikely drafts end early, and the other drafts are extended until there are about `max_tokens` tokens.
        """
        tokens = list[tuple[float, int]]()
        drafts = [(index, self._start_draft(sequence)) for index, sequence in enumerate(sequences)]
        if len(sequences) <= MAX_CHECKED_FIRST:
            self._check_guesses()
        while drafts and len(tokens) < max_tokens:
            num_each, unfinished = max(1, (max_tokens - len(tokens)) // len(drafts)), []
            for draft in drafts:
                index, likely = draft[0], 0.0
                for likely in islice(draft[1], num_each):
                    tokens.append((likely, index))
                if likely:
                    unfinished.append(draft)
            drafts = unfinished
        return tokens

    def _check_guesses(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        self._head_trial.record_accepted(sum([guesses.record() for guesses in unchecked]))

    def _start_draft(self, sequence: Sequence) -> Iterator[float]:
        """Return an iterator that extends a new draft by one token at a time.

        Guesses for tokens in flight are assumed to be correct.
        """
        state = self._states[sequence]
        if state.guesses:
            self._unchecked.append(state.start_guesses(sequence.token_ids))
        state.first = len(sequence.token_ids)
        return self._extend(sequence, state.guesses)

    def _extend(self, sequence: Sequence, guesses: list[Guess]) -> Iterator[float]:
        """Append guesses, and yield after each draft token the probability that the draft so far is correct."""
        num_in_flight, probability = sequence.num_in_flight, 1.0
        max_tokens = min(self._max_tokens, sequence.num_remaining - 1)
        for guess, likely in islice(self._guess_tokens(sequence), num_in_flight + max(max_tokens, 0)):
            guesses.append(guess)
            if num_in_flight:
                num_in_flight -= 1
                continue
            probability *= likely
            if probability < MIN_PROBABILITY:
                return
            yield probability

    def _guess_tokens(self, sequence: Sequence) -> Iterator[tuple[Guess, float]]:
        """Yield guesses for the tokens after the sequence's last known token. Each guess has the probability that it is
        correct if all previous guesses are correct.
        """
        state, token_ids = self._states[sequence], sequence.token_ids
        completions, accuracy = state.history
        state.lookup.update(token_ids)
        context = token_ids[-max(ORDERS) :]
        position, length = state.lookup.find(token_ids)
        head, num_heads = len(token_ids) - sequence.first_head_guess, len(sequence.head_guesses)
        while True:
            guess = completions.guess(context)
            likely = accuracy.estimate(guess.kind) if guess is not None else 0.0
            if head < num_heads:
                guessed = Guess(sequence.head_guesses[head], HEAD_KINDS + head)
                if (head_likely := accuracy.estimate(guessed.kind)) > likely:
                    guess, likely = guessed, head_likely
                head += 1
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

    def _find_state(self, sequence: Sequence) -> _SequenceState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _SequenceState(sequence, self._find_history(sequence))
        return state

    def _find_history(self, sequence: Sequence) -> AdapterHistory:
        request = sequence.request
        scope = request.adapter_identity, request.salt
        history = self._histories.find(request.tenant, scope)
        self._histories.keep(request.tenant, scope, history)  # running sequences share it
        return history
