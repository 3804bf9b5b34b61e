"""Draft heads are paused while their guesses do not help."""

from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from lorax_server.engine.speculation.head_trial import PAUSE_STEPS, TRIAL_STEPS, HeadTrial
from tests.engine.speculation.test_drafter import MAX_ROWS, make_drafter, make_sequence

NUM_STEPS = 2 * (TRIAL_STEPS + PAUSE_STEPS)


def count_runs(trial: HeadTrial, num_sequences: int, accepted: int) -> int:
    """Return how many of `NUM_STEPS` steps run the heads, if each of them yields `accepted` accepted guesses."""
    count = 0
    for _ in range(NUM_STEPS):
        if trial.start_step(num_sequences):
            trial.record_accepted(accepted)
            count += 1
    return count


def test_useful_heads_always_run() -> None:
    assert count_runs(HeadTrial(), 1, 1) == NUM_STEPS
    assert count_runs(HeadTrial(), 8, 4) == NUM_STEPS


def test_heads_without_accepted_guesses_rarely_run() -> None:
    assert count_runs(HeadTrial(), 1, 0) < 3 * TRIAL_STEPS
    assert count_runs(HeadTrial(), 8, 1) < 3 * TRIAL_STEPS


def run_steps(drafter: SpeculativeDrafter, offset: int) -> int:
    """Decode one sequence. The head guesses the next token plus `offset`. Return the number of steps with heads."""
    sequence, count = make_sequence([1], [2]), 0
    for token_id in range(3, 300):
        drafter.propose([sequence], 1, MAX_ROWS)
        drafter.learn()
        count += drafter.must_run_heads(1)
        sequence.token_ids.append(token_id)
        sequence.head_guesses, sequence.first_head_guess = [token_id + 1 + offset], len(sequence.token_ids)
    return count


def test_accepted_guesses_of_heads_are_counted() -> None:
    assert run_steps(make_drafter(), 0) == 297
    assert run_steps(make_drafter(), 1) == TRIAL_STEPS - 1
