"""Decides whether the draft heads run. They take time in each step, even if their guesses are not used."""

TRIAL_STEPS = 64  # steps with heads between two decisions
MIN_ACCEPTED = 0.3  # accepted guesses of heads per step and sequence below which the heads are paused
PAUSE_STEPS = 3000  # steps until paused heads are tried again


class HeadTrial:
    """Pauses the draft heads while few of their guesses are accepted as draft tokens."""

    def __init__(self) -> None:
        self._num_steps = 0  # in this trial; negative while the heads are paused
        self._num_sequences = 0  # sum over the steps in this trial
        self._num_accepted = 0

    def start_step(self, num_sequences: int) -> bool:
        """Count a step, and return True if it should run the heads."""
        self._num_steps += 1
        if self._num_steps <= 0:
            return False
        self._num_sequences += num_sequences
        if self._num_steps < TRIAL_STEPS:
            return True
        is_useful = self._num_accepted >= MIN_ACCEPTED * self._num_sequences
        self._num_steps = 0 if is_useful else -PAUSE_STEPS
        self._num_sequences = self._num_accepted = 0
        return is_useful

    def record_accepted(self, count: int) -> None:
        """Record guesses of the heads that were accepted as draft tokens."""
        self._num_accepted += count
