"""Measure speculative decoding with the Llama-3.1-8B shape on one GPU, with replayed drafts.

A first run without speculation records the completions. The drafter then proposes the recorded tokens, but each
position is wrong with probability 0.2 (acceptance 0.8) or 1 (acceptance 0). Every run draws different positions. The
number of draft tokens is chosen as in the server, based on measured step times and accuracy. Runs with and without
speculation take turns, and the speedup is the median over rounds. The speed includes only steps in which all sequences
decode, because a server replaces finished sequences.

The model always counts: the token after token `i` is `i + 1`, so that rounding errors do not change completions. The
weights of its layers and its adapters are random.
"""

import itertools
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.engine import COUNTING_MODEL, Adapter, Bench, Mark, make_parser, open_bench, plain_adapters
from harness.files import TINY
from harness.report import Record, report

from lorax_server.engine.sequence import Sequence as EngineSequence
from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from lorax_server.engine.speculation.guess import Guess
from lorax_server.engine.speculation.step_costs import GPU_PRIOR, StepCosts
from lorax_server.process_tuning import tune_gc
from lorax_server.types import Output

PROMPT, TOKENS, ROUNDS = 128, 256, 5
SHORT_TOKENS, SHORT_ROUNDS = 16, 1  # with a tiny model
MAX_LENGTH = 1024
ACCEPTANCES = (0.8, 0.0)
MIN_SPEEDUP = 0.97
GUESS_KIND = 0  # all replayed guesses are equally likely to be correct
Completions = Mapping[tuple[int, ...], list[int]]  # by prompt


class SpeculationCase(NamedTuple):
    """A batch of `rows` sequences with different adapters. `goal` is the speedup at acceptance 0.8."""

    rows: int
    adapters: tuple[Adapter, ...]
    goal: float = MIN_SPEEDUP

    @property
    def key(self) -> str:
        return f"{self.rows}/{len(self.adapters)}"

    @property
    def row_adapters(self) -> list[str]:
        """Return the adapter of each sequence."""
        return [self.adapters[i * len(self.adapters) // self.rows].name for i in range(self.rows)]


CASES = (
    SpeculationCase(1, plain_adapters(1), 3.0),
    SpeculationCase(16, plain_adapters(16)),
    SpeculationCase(64, plain_adapters(64), 1.5),
    SpeculationCase(256, plain_adapters(64)),
)


class ReplayDrafter(SpeculativeDrafter):
    """Guesses the tokens of known completions. A fixed fraction of the positions is wrong, independently."""

    def __init__(self, completions: Completions, acceptance: float, max_tokens: int, vocab_size: int) -> None:
        super().__init__(max_tokens, costs=StepCosts(GPU_PRIOR))
        self._completions, self._acceptance, self._vocab_size = completions, acceptance, vocab_size
        self.draw_errors(0)

    def draw_errors(self, seed: int) -> None:
        """Choose the positions whose guesses are wrong."""
        choice, acceptance, vocab_size = random.Random(seed), self._acceptance, self._vocab_size
        self._replayed: dict[tuple[int, ...], list[int]] = {
            prompt: [
                token_id if choice.random() < acceptance else (token_id + vocab_size // 2) % vocab_size
                for token_id in token_ids
            ]
            for prompt, token_ids in self._completions.items()
        }
        self._by_sequence: dict[EngineSequence, list[int]] = {}  # hashing the prompts takes long

    def _guess_tokens(self, sequence: EngineSequence) -> Iterator[tuple[Guess, float]]:
        accuracy = self._states[sequence].history.accuracy
        if (replayed := self._by_sequence.get(sequence)) is None:
            replayed = self._by_sequence[sequence] = self._replayed[tuple(sequence.request.prompt_ids)]
        for token_id in itertools.islice(replayed, sequence.num_generated, None):
            yield Guess(token_id, GUESS_KIND), accuracy.estimate(GUESS_KIND)


@dataclass
class DraftCounts:
    """Numbers of draft tokens."""

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0  # first wrong token of each draft; the tokens after it are not checked

    def record(self, num_drafted: int, num_accepted: int, num_rejected: int) -> None:
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.rejected += num_rejected

    @property
    def acceptance(self) -> float:
        return self.accepted / max(self.accepted + self.rejected, 1)


class Recording:
    """Records the tokens and the time of the steps in which all sequences decode."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences
        self._started: set[int] = set()  # sequences with at least one token
        self._times: list[float] = []  # end of the step that completes the first tokens, and of all later steps
        self._num_tokens = 0  # in steps after the first of these steps
        self._is_finished = False  # some sequence is finished
        self.drafts = DraftCounts()

    def record_step(self, mark: Mark, outputs: list[Output]) -> None:
        self._is_finished |= any(output.finish_reason is not None for output in outputs)
        if not outputs or self._is_finished:
            return  # without outputs, the step was submitted, but no step was collected
        if len(self._started) == self._num_sequences:
            self._num_tokens += sum(len(output.tokens) for output in outputs)
            self._times.append(mark.at)
            for output in outputs:
                num_drafted, num_accepted = output.num_drafted, output.num_accepted
                self.drafts.record(num_drafted, num_accepted, int(num_accepted < num_drafted))
            return
        self._started.update(output.request_id for output in outputs if output.tokens)
        if len(self._started) == self._num_sequences:
            self._times.append(mark.at)

    @property
    def num_steps(self) -> int:
        return len(self._times) - 1

    @property
    def seconds(self) -> float:
        return self._times[-1] - self._times[0]

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self.seconds


class Run(NamedTuple):
    """A measured batch of completions."""

    tokens_per_s: float
    seconds: float
    num_steps: int
    completions: list[list[int]]
    drafts: DraftCounts


def generate(
    bench: Bench, case: SpeculationCase, prompts: Sequence[list[int]], tokens: int, drafter: SpeculativeDrafter | None
) -> Run:
    """Generate all completions with this drafter, or without speculation."""
    bench.llm._engine._scheduler._drafter = drafter
    recording = Recording(case.rows)
    with bench.clock.observed(recording.record_step):
        completions = bench.generate(prompts, tokens, case.row_adapters)
    bench.llm._engine._scheduler._drafter = None
    return Run(recording.tokens_per_s, recording.seconds, recording.num_steps, completions, recording.drafts)


def measure_case(bench: Bench, case: SpeculationCase, max_tokens: int, tokens: int, rounds: int) -> list[Record]:
    """Return the speed without speculation, and the speedup for each acceptance."""
    bench.load(case.adapters)
    prompts = bench.draw_prompts(case.rows, PROMPT, seed=case.rows)
    expected = generate(bench, case, prompts, tokens, None).completions
    completions = {tuple(prompt): token_ids for prompt, token_ids in zip(prompts, expected, strict=True)}
    records = []
    for acceptance in ACCEPTANCES:
        drafter = ReplayDrafter(completions, acceptance, max_tokens, bench.shape.vocab_size)
        generate(bench, case, prompts, tokens, drafter)  # measures the step times
        speedups, plain_runs, runs = list[float](), list[Run](), list[Run]()
        for number in range(rounds):
            drafter.draw_errors(1 + number)
            plain_runs.append(generate(bench, case, prompts, tokens, None))
            runs.append(generate(bench, case, prompts, tokens, drafter))
            speedups.append(runs[-1].tokens_per_s / plain_runs[-1].tokens_per_s)
        drafts = DraftCounts()
        for run in runs:
            drafts.record(run.drafts.drafted, run.drafts.accepted, run.drafts.rejected)
        all_runs = (*plain_runs, *runs)
        num_different = sum(
            found != known for run in all_runs for found, known in zip(run.completions, expected, strict=True)
        )
        name = f"{case.key}, acceptance {acceptance:g}"
        goal = None if bench.shape is TINY else case.goal if acceptance else MIN_SPEEDUP
        plain_rate = statistics.median(run.tokens_per_s for run in plain_runs)
        rate = statistics.median(run.tokens_per_s for run in runs)
        all_speedups = " ".join(f"{speedup:.2f}" for speedup in speedups)
        measured = f"{drafts.acceptance:.2f} accepted"
        print(f"{name:28}  {plain_rate:8.0f}  {rate:8.0f} tokens/s  ({all_speedups})  {measured}", flush=True)
        num_steps, plain_steps = (sum(run.num_steps for run in each) for each in (runs, plain_runs))
        ms, plain_ms = (
            1e3 * sum(run.seconds for run in each) / count
            for each, count in ((runs, num_steps), (plain_runs, plain_steps))
        )
        records += [
            Record(f"{name}: speedup", statistics.median(speedups), "x", "no speculation", goal),
            Record("  smallest speedup", min(speedups), "x", "no speculation"),
            Record("  speed", rate, "tokens/s", f"{plain_rate:.0f} without speculation"),
            Record("  time per step", ms, "ms", f"{plain_ms:.2f} ms without speculation"),
            Record("  draft tokens per step and sequence", drafts.drafted / num_steps / case.rows, "tokens"),
            Record("  accepted drafts", drafts.accepted / max(drafts.drafted, 1), "of draft tokens"),
            Record("  acceptance", drafts.acceptance, "of draft tokens after correct tokens"),
            Record("  completions with other tokens", num_different, "completions", goal=0, at_most=True),
        ]
    return records


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=[case.key for case in CASES], metavar="CASE", help="%(choices)s")
    parser.add_argument("--tokens", type=int, default=8, help="maximum draft tokens (default: %(default)s)")
    parser.add_argument("--length", type=int, help=f"tokens per completion (default: {TOKENS})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    args = parser.parse_args()
    cases = [case for case in CASES if args.cases is None or case.key in args.cases]
    adapters = dict.fromkeys(adapter for case in cases for adapter in case.adapters)
    length = args.length or (SHORT_TOKENS if args.tiny else TOKENS)
    rounds = args.rounds or (SHORT_ROUNDS if args.tiny else ROUNDS)
    records: list[Record] = []
    with open_bench(args, list(adapters), COUNTING_MODEL, max_length=MAX_LENGTH) as bench:
        tune_gc()  # as in the server
        for case in cases:
            records += measure_case(bench, case, args.tokens, length, rounds)
    report(records, args.json)


if __name__ == "__main__":
    main()
