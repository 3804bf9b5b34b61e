"""Simulates decode steps with drafts on a virtual clock."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lorax_server.engine.sequence import Sequence
from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from lorax_server.engine.speculation.guess import Guess
from lorax_server.engine.speculation.step_costs import DevicePrior, StepCosts
from lorax_server.types import Request, SamplingParams, StopParams

TOKEN, WRONG_TOKEN = 1, 2  # all completions repeat `TOKEN`
CostModel = Callable[[int], float]  # seconds by number of tokens


@dataclass
class Machine:
    """Step times in any unit."""

    cost: CostModel
    draft_overhead: float = 0.0  # added to each step with drafts
    num_slow_steps: int = 0  # first steps of each size and kind that take 10 times as long
    noise: float = 0.0  # a step takes at most this fraction more or less
    outliers: float = 0.0  # probability that a step takes 5 times as long


class _ReplayDrafter(SpeculativeDrafter):
    """Each guess is wrong with a fixed probability. Only the accuracy of earlier guesses is known."""

    def __init__(self, acceptance: float, max_tokens: int, prior: DevicePrior) -> None:
        super().__init__(max_tokens, costs=StepCosts(prior))
        self._acceptance = acceptance
        self._random = random.Random(0)

    def _guess_tokens(self, sequence: Sequence) -> Iterator[tuple[Guess, float]]:
        accuracy = self._states[sequence].history.accuracy
        while True:
            is_right = self._random.random() < self._acceptance
            yield Guess(TOKEN if is_right else WRONG_TOKEN, 0), accuracy.estimate(0)


def simulate(
    machine: Machine,
    num_sequences: int,
    acceptance: float,
    prior: DevicePrior,
    *,
    num_steps: int = 1500,
    max_rows: int = 256,
    max_tokens: int = 8,
) -> float:
    """Return the speedup over steps without drafts on the same machine."""
    drafter = _ReplayDrafter(acceptance, max_tokens, prior)
    stop = StopParams(max_new_tokens=10**6)
    sequences = [Sequence(Request(index, [TOKEN], SamplingParams(), stop), 0) for index in range(num_sequences)]
    for sequence in sequences:
        sequence.token_ids.append(TOKEN)
    rates = []
    for is_speculative in (False, True):
        choice = random.Random(1)
        counts: dict[tuple[bool, int], int] = {}
        seconds, num_tokens = 0.0, 0
        for _ in range(num_steps):
            drafts = drafter.propose(sequences, num_sequences, max_rows - num_sequences) if is_speculative else {}
            num_drafted = sum(map(len, drafts.values()))
            assert num_sequences + num_drafted <= max(max_rows, num_sequences)
            size = bool(drafts), num_sequences + num_drafted
            counts[size] = counts.get(size, 0) + 1
            step_s = machine.cost(size[1]) + machine.draft_overhead * size[0]
            step_s *= 10 if counts[size] <= machine.num_slow_steps else 1
            step_s *= 1 + machine.noise * choice.uniform(-1, 1)
            step_s *= 5 if choice.random() < machine.outliers else 1
            seconds += step_s
            for sequence in sequences:
                draft = drafts.get(sequence, ())
                num_accepted = next((i for i, token_id in enumerate(draft) if token_id != TOKEN), len(draft))
                sequence.token_ids += [TOKEN] * (num_accepted + 1)
                num_tokens += num_accepted + 1
            if is_speculative:
                drafter.learn()
                drafter.record_step(num_sequences, num_drafted, step_s)
        rates.append(num_tokens / seconds)
    return rates[1] / rates[0]
