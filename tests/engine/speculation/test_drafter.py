"""Draft tokens from prompts and from earlier completions."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lorax_server.engine.sequence import Sequence as EngineSequence
from lorax_server.engine.speculation.completion_index import ENTRY_BYTES, MAX_HISTORIES, CompletionIndex, Histories
from lorax_server.engine.speculation.drafter import (
    MAX_FAILURES,
    MAX_LEARNED_TOKENS,
    MAX_RETRY_STEPS,
    MAX_UNINDEXED,
    SpeculativeDrafter,
)
from lorax_server.engine.speculation.guess import Accuracy
from lorax_server.engine.speculation.prompt_lookup import MAX_PROMPT_TOKENS, PromptLookup
from lorax_server.engine.speculation.step_costs import (
    CPU_PRIOR,
    GPU_PRIOR,
    MAX_AGE,
    REFRESH_STEPS,
    DevicePrior,
    StepCosts,
    round_size,
    step_sizes,
)
from lorax_server.types import Request, SamplingParams, StopParams

TEXT = [*range(100, 130)]
MAX_ROWS = 256  # tokens in a step


def make_sequence(prompt: Sequence[int], completion: Sequence[int] = (), **options: Any) -> EngineSequence:
    request = Request(0, prompt, SamplingParams(), StopParams(max_new_tokens=1000), **options)
    sequence = EngineSequence(request, 0)
    sequence.token_ids += completion
    return sequence


def teach(drafter: SpeculativeDrafter, prompt: Sequence[int], completion: Sequence[int], **options: Any) -> None:
    """Finish a completion. The drafter sees each of its tokens, as the engine does."""
    for length in range(1, len(completion) + 1):
        sequence = make_sequence(prompt, completion[:length], **options)
        propose(drafter, sequence, 1)
    drafter.finish(sequence)
    drafter.learn()


def propose(drafter: SpeculativeDrafter, sequence: EngineSequence, num_running: int) -> list[int]:
    """Return the draft of one sequence. The other running sequences have no drafts."""
    drafter.learn()
    return drafter.propose([sequence], num_running, MAX_ROWS - num_running).get(sequence, [])


def waits(drafter: SpeculativeDrafter, sequence: EngineSequence, num_running: int) -> bool:
    drafter.learn()
    return drafter.waits([sequence], num_running, MAX_ROWS - num_running)


def make_drafter(fixed_s: float = 1.0, per_token_s: float = 0.1, **options: Any) -> SpeculativeDrafter:
    """Return a drafter that has measured steps of several sizes."""
    drafter = SpeculativeDrafter(**{"max_tokens": 8} | options)
    for _ in range(50):
        for num_sequences, num_drafted in ((1, 0), (1, 3), (4, 0), (4, 12)):
            seconds = fixed_s + per_token_s * (num_sequences + num_drafted)
            drafter.record_step(num_sequences, num_drafted, seconds)
    return drafter


@pytest.mark.parametrize("num_known", [0, 1])
def test_draft_contains_guesses_of_draft_heads(num_known: int) -> None:
    """Forced tokens may follow the token after which the heads guessed. The first guesses are then not needed."""
    drafter, sequence = make_drafter(), make_sequence([1, 2], [3, 4])
    sequence.head_guesses, sequence.first_head_guess = [7, 8, 9], 4 - num_known
    draft = propose(drafter, sequence, 1)
    assert draft == [7, 8, 9][num_known : num_known + len(draft)]
    assert draft


def test_old_guesses_of_draft_heads_are_ignored() -> None:
    drafter, sequence = make_drafter(), make_sequence([1, 2], [3, 4, 5, 6])
    sequence.head_guesses, sequence.first_head_guess = [7, 8], 3
    assert propose(drafter, sequence, 1) == []


# --- Prompt -----------------------------------------------------------------------------------------------------------


def test_draft_copies_the_prompt() -> None:
    drafter = make_drafter()
    draft = propose(drafter, make_sequence([1, *TEXT, 2], [3, *TEXT[:6]]), 1)
    assert draft == TEXT[6 : 6 + len(draft)]
    assert len(draft) > 1


def test_lookup_finds_the_last_long_match() -> None:
    lookup, tokens = PromptLookup(0), [1, 2, 3, 4, 9, 3, 5, 1, 2, 3]
    lookup.update(tokens)
    assert lookup.find(tokens) == (3, 3)
    assert tokens[3] == 4


def test_lookup_falls_back_to_one_token() -> None:
    lookup, tokens = PromptLookup(0), [1, 2, 7, 5, 7]
    lookup.update(tokens)
    assert lookup.find(tokens) == (3, 1)


def test_lookup_of_unknown_token_finds_nothing() -> None:
    lookup, tokens = PromptLookup(0), [1, 2, 3]
    lookup.update(tokens)
    assert lookup.find(tokens) == (0, 0)


def test_lookup_indexes_a_limited_number_of_prompt_tokens() -> None:
    tokens = [5, 6, *[1] * MAX_PROMPT_TOKENS, 5]
    lookup = PromptLookup(len(tokens))
    lookup.update(tokens)
    assert lookup.find(tokens) == (0, 0)


# --- Earlier completions ----------------------------------------------------------------------------------------------


def test_draft_repeats_an_earlier_completion() -> None:
    drafter = make_drafter()
    teach(drafter, [1, 2], TEXT)
    draft = propose(drafter, make_sequence([3, 2], TEXT[:4]), 1)
    assert draft == TEXT[4 : 4 + len(draft)]
    assert len(draft) > 1


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter_identity": "new"}, {"salt": "s"}], ids=str)
def test_histories_are_separate(other: dict[str, str]) -> None:
    """A completion influences no other tenant, no other version of the adapter, and no other cache salt."""
    known = {"tenant": "a", "adapter_identity": "old"}
    taught, fresh = make_drafter(), make_drafter()
    for _ in range(3):
        teach(taught, [1, 2], TEXT, **known)
    for length in (1, 4, 9):
        options = known | other
        one, two = (make_sequence([3, 2], TEXT[:length], **options) for _ in range(2))
        assert propose(taught, one, 1) == propose(fresh, two, 1) == []
    assert propose(taught, make_sequence([3, 2], TEXT[:4], **known), 1)


def test_concurrent_sequences_share_statistics() -> None:
    drafter = make_drafter()
    sequences = [make_sequence([1, 2], TEXT) for _ in range(2)]
    drafter.propose(sequences, 2, MAX_ROWS)
    assert drafter._states[sequences[0]].history is drafter._states[sequences[1]].history


def test_finished_completions_are_indexed_in_later_steps() -> None:
    """Indexing takes long, so each step indexes a limited number of tokens. Short completions are indexed together."""
    drafter, text = make_drafter(), [*range(1000, 1000 + MAX_LEARNED_TOKENS)]
    for completion in (TEXT[:4], TEXT, text, [*range(5000, 5030)]):
        drafter.finish(make_sequence([1, 2], completion))
    assert drafter.propose([make_sequence([3, 2], TEXT[:4])], 1, MAX_ROWS) == {}
    completions, num_entries = drafter._histories.find("", ("", "")).completions, list[int]()
    assert completions.num_entries == 0
    for _ in range(3):
        drafter.learn()
        num_entries.append(completions.num_entries)
    assert 0 < num_entries[0] < num_entries[1] == num_entries[2]
    assert propose(drafter, make_sequence([3, 2], TEXT[:4]), 1)


def test_number_of_completions_to_index_is_bounded() -> None:
    """Large batches with drafts can generate more tokens per step than a step indexes."""
    drafter, oldest = make_drafter(), [*range(2000, 2010)]
    for completion in (oldest, *[TEXT[:8]] * MAX_UNINDEXED):
        drafter.finish(make_sequence([1, 2], completion))
    for _ in range(MAX_UNINDEXED):
        drafter.learn()
    assert not propose(drafter, make_sequence([3, 2], oldest[:4]), 1)
    assert propose(drafter, make_sequence([3, 2], TEXT[:4]), 1)


def test_most_frequent_token_is_guessed() -> None:
    index = CompletionIndex(1000)
    for token_id in (7, 8, 8, 7, 8):
        index.add([1, 2, 3, token_id], 3)
    guess = index.guess([1, 2, 3])
    assert guess is not None
    assert guess.token_id == 8


def test_longest_known_context_is_used() -> None:
    index = CompletionIndex(1000)
    for _ in range(5):
        index.add([5, 6, 3, 7], 3)
    index.add([1, 2, 3, 8], 3)
    assert (index.guess([1, 2, 3]) or (0,))[0] == 8
    assert (index.guess([9, 9, 3]) or (0,))[0] == 7
    assert index.guess([9, 9, 9]) is None


def test_index_size_is_bounded_and_recent_completions_stay() -> None:
    index = CompletionIndex(400)
    for start in range(0, 10_000, 10):
        tokens = list(range(start, start + 10))
        index.add(tokens, 1)
        assert index.num_entries <= 400 + 4 * len(tokens)
    assert (index.guess([9994, 9995]) or (0,))[0] == 9996
    assert index.guess([4, 5]) is None


def test_tenant_memory_is_bounded() -> None:
    histories = Histories(100 * ENTRY_BYTES, max_tenants=2)
    first = histories.find("a", ("one", ""))
    for name in ("one", "two", "three"):
        history = histories.find("a", (name, ""))
        history.completions.add(range(30), 1)
        histories.keep("a", (name, ""), history)
    assert histories.find("a", ("one", "")) is not first
    kept = histories.find("b", ("one", ""))
    for tenant in "bc":
        histories.keep(tenant, ("one", ""), kept)
    assert histories.find("b", ("one", "")) is kept
    assert histories.find("a", ("three", "")) is not history


def test_number_of_histories_per_tenant_is_bounded() -> None:
    histories = Histories()
    first = histories.find("a", ("", "0"))
    for salt in range(MAX_HISTORIES + 1):
        histories.keep("a", ("", str(salt)), first if salt == 0 else histories.find("a", ("", str(salt))))
    assert histories.find("a", ("", "0")) is not first
    assert histories.find("a", ("", "1")) is histories.find("a", ("", "1"))


def test_running_sequences_keep_their_history_with_many_tenants() -> None:
    drafter = make_drafter(histories=Histories(max_tenants=1))
    sequences = [make_sequence([1, 2], TEXT, tenant=tenant) for tenant in "ab"]
    for sequence in sequences:
        propose(drafter, sequence, 2)
    for sequence in sequences:
        drafter.finish(sequence)
    assert propose(drafter, make_sequence([3, 2], TEXT[:4], tenant="b"), 1)


# --- Length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fixed_s", "num_running", "drafts"), [(1.0, 1, True), (1.0, 200, False), (0.0, 1, False)])
def test_drafts_are_proposed_only_if_step_costs_allow_savings(fixed_s: float, num_running: int, drafts: bool) -> None:
    """Without fixed costs per step, or on a large batch, a draft token costs as much as a step without it."""
    drafter = make_drafter(fixed_s)
    for _ in range(3):
        teach(drafter, [1, 2], TEXT)
    assert bool(propose(drafter, make_sequence([3, 2], TEXT[:9]), num_running)) == drafts


def test_max_batch_size_and_max_tokens_limit_drafts() -> None:
    drafter = make_drafter(1.0, 0.01, max_tokens=2, max_batch_size=4)
    for _ in range(3):
        teach(drafter, [1, 2], TEXT)
    sequence = make_sequence([3, 2], TEXT[:9])
    assert propose(drafter, sequence, 4) == TEXT[9:11]
    assert propose(drafter, sequence, 5) == []


def test_wrong_guesses_stop_drafts() -> None:
    """The text repeats single tokens, but never what followed them."""
    drafter, tokens = make_drafter(), [index * index % 61 for index in range(61)] * 8
    drafts = [propose(drafter, make_sequence(tokens[:1], tokens[1:2]), 1)]
    sequence = make_sequence(tokens[:1])
    for number in range(400):
        sequence.token_ids.append(tokens[number] + number % 7)
        drafts.append(propose(drafter, sequence, 1))
    assert sum(map(len, drafts[-100:])) < 10


def test_unpredictable_sequences_are_rarely_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sequences are tried in every step, and the sequence is tried again when its text becomes predictable."""
    drafter, tried = make_drafter(), list[EngineSequence]()
    unpredictable, repetitive = make_sequence([1]), make_sequence([1, *TEXT, 2], [3, *TEXT])
    start_draft = drafter._start_draft

    def record(sequence: EngineSequence) -> Iterator[float]:
        tried.append(sequence)
        return start_draft(sequence)

    monkeypatch.setattr(drafter, "_start_draft", record)
    for number in range(200):
        unpredictable.token_ids.append(1000 + number)
        repetitive.token_ids.append(TEXT[number % len(TEXT)])
        assert unpredictable not in drafter.propose([unpredictable, repetitive], 2, MAX_ROWS)
    assert tried.count(repetitive) == 200
    assert tried.count(unpredictable) < 200 / MAX_RETRY_STEPS + MAX_FAILURES + 5
    drafts = []
    for number in range(100):
        unpredictable.token_ids.append(TEXT[number % len(TEXT)])
        drafts.append(propose(drafter, unpredictable, 1))
    assert all(drafts[-40:])


def test_accuracy_follows_recent_guesses() -> None:
    accuracy = Accuracy()
    before = accuracy.estimate(1)
    for _ in range(500):
        accuracy.record(1, is_right=True)
    assert accuracy.estimate(1) > 0.95 > before
    for _ in range(500):
        accuracy.record(1, is_right=False)
    assert accuracy.estimate(1) < 0.1
    assert accuracy.estimate(2) == before


def measure_costs(costs: StepCosts, num_sequences: int, num_drafted: int, seconds: float, num_steps: int = 20) -> None:
    for _ in range(num_steps):
        costs.record(num_sequences, num_drafted, seconds)


def test_step_sizes() -> None:
    assert [*step_sizes(0, 20)] == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20]
    assert [*step_sizes(64, 190)] == [96, 128, 190]
    assert [*step_sizes(9, 9)] == []
    assert all(round_size(size) == size for size in step_sizes(0, 256))


def test_assumed_step_costs() -> None:
    costs = StepCosts(CPU_PRIOR)
    measure_costs(costs, 2, 0, 10.0)
    plain_s, sizes = costs.estimate(2, 3)
    assert plain_s == 10.0
    ((size, seconds),) = sizes
    assert size == 3
    assert seconds == pytest.approx(10.0 * 1.1 + 1.0)


def test_first_steps_have_no_drafts() -> None:
    """Without drafts, the time of a step is not known, so the times of steps with drafts are of no use."""
    costs = StepCosts()
    while costs.must_measure_plain(4, 2.0):
        costs.record(4, 0, 0.01)
    assert costs.estimate_plain(4) == 0.01


def test_step_costs_are_interpolated() -> None:
    costs = StepCosts()
    measure_costs(costs, 1, 0, 0.010)
    measure_costs(costs, 8, 0, 0.017)
    measure_costs(costs, 4, 4, 0.020)
    measure_costs(costs, 4, 12, 0.036)
    plain_s, sizes = costs.estimate(4, 24)
    estimates = dict(sizes)
    assert plain_s == pytest.approx(0.013)
    assert estimates[8] == pytest.approx(0.020)
    assert estimates[12] == pytest.approx(0.028, rel=0.1)
    assert estimates[16] == pytest.approx(0.036)
    assert estimates[24] == pytest.approx(0.052, rel=0.1)


def test_slow_steps_do_not_change_step_costs() -> None:
    """The first steps of each size are slow, and a few later steps."""
    costs = StepCosts()
    for number in range(40):
        factor = 10 if number < 3 or number % 7 == 0 else 1
        costs.record(4, 0, 0.01 * factor)
        costs.record(4, 4, 0.02 * factor)
    plain_s, sizes = costs.estimate(4, 8)
    assert plain_s == 0.01
    assert dict(sizes)[8] == 0.02


def test_step_costs_do_not_decrease_with_the_size() -> None:
    """One of the measured times must be wrong. The drafter assumes the better case, and measures again."""
    costs = StepCosts()
    measure_costs(costs, 4, 0, 0.01)
    measure_costs(costs, 4, 4, 0.03)
    measure_costs(costs, 4, 8, 0.02)
    assert dict(costs.estimate(4, 12)[1])[8] == 0.02


def test_draft_costs_expire() -> None:
    costs = StepCosts()
    measure_costs(costs, 4, 0, 0.01)
    measure_costs(costs, 4, 4, 0.1)
    assert dict(costs.estimate(4, 8)[1])[8] == 0.1
    measure_costs(costs, 4, 0, 0.01, num_steps=MAX_AGE + REFRESH_STEPS)
    assert dict(costs.estimate(4, 8)[1])[8] < 0.02


def test_steps_without_drafts_are_measured_regularly() -> None:
    costs = StepCosts()
    measure_costs(costs, 4, 0, 0.01)
    assert not costs.must_measure_plain(4, 2.0)
    measure_costs(costs, 4, 4, 0.01, num_steps=50)
    assert not costs.must_measure_plain(4, 2.0)
    assert costs.must_measure_plain(4, 1.1)
    assert costs.must_measure_plain(64, 2.0)  # this batch size was never measured
    measure_costs(costs, 4, 4, 0.01, num_steps=50)
    assert costs.must_measure_plain(4, 2.0)


def test_most_likely_tokens_of_the_batch_are_drafted() -> None:
    """Both sequences have a long match, but the second sequence's guesses were often wrong."""
    drafter = make_drafter()
    sure, unsure = (make_sequence([1, *TEXT, 2], [3, *TEXT[:6]], tenant=tenant) for tenant in "ab")
    for sequence in (sure, unsure):
        drafter.propose([sequence], 2, 1)
    for kind in range(100):
        for _ in range(50):
            drafter._states[sure].history.accuracy.record(kind, is_right=True)
            drafter._states[unsure].history.accuracy.record(kind, is_right=False)
    drafts = drafter.propose([unsure, sure], 2, MAX_ROWS)
    assert len(drafts[sure]) > 4
    assert unsure not in drafts
    assert drafter.propose([unsure, sure], 2, 3) == {sure: TEXT[6:9]}


def test_state_of_finished_sequences_is_dropped() -> None:
    drafter, sequence = make_drafter(), make_sequence([1, 2], TEXT)
    propose(drafter, sequence, 1)
    drafter.finish(sequence)
    assert drafter.num_sequences == 0


def test_sequence_waits_only_if_a_draft_is_likely() -> None:
    """With several steps in flight, sequences without drafts do not wait for their tokens."""
    drafter, sequence = make_drafter(), make_sequence([1, 2], [3])
    assert propose(drafter, sequence, 1) == []
    sequence.num_in_flight = 1
    assert not waits(drafter, sequence, 1)
    sequence.token_ids += range(200, 230)  # no token occurs twice
    assert not waits(drafter, sequence, 1)
    sequence.token_ids += [*TEXT, *TEXT[:20]]
    assert any(waits(drafter, sequence, 1) for _ in range(MAX_RETRY_STEPS))
    sequence.num_in_flight = 0
    draft = propose(drafter, sequence, 1)
    assert draft == TEXT[20 : 20 + len(draft)]
    assert draft


def test_guesses_of_waiting_sequences_are_checked() -> None:
    """Guesses are checked even if no draft is used, so that accuracy follows a change of the text."""
    drafter, sequence = make_drafter(), make_sequence([1, 2], [*TEXT, 3, *TEXT[:10]])
    assert propose(drafter, sequence, 1)
    sequence.num_in_flight, known = 1, len(sequence.token_ids)
    for number in range(400):
        sequence.token_ids.append(TEXT[number % 7] if number % 2 else 1000 + number)
        waits(drafter, sequence, 1)
    num_waits = 0
    for number in range(200):
        sequence.token_ids.append(TEXT[number % 7] if number % 2 else 2000 + number)
        num_waits += waits(drafter, sequence, 1)
    assert len(sequence.token_ids) == known + 600
    assert num_waits < 10


def test_no_sequence_waits_while_the_batch_is_too_large() -> None:
    drafter, sequence = make_drafter(max_batch_size=1), make_sequence([1, 2], [*TEXT, *TEXT[:20]])
    sequence.num_in_flight = 1
    assert not any(waits(drafter, sequence, 2) for _ in range(MAX_RETRY_STEPS))
    assert any(waits(drafter, sequence, 1) for _ in range(MAX_RETRY_STEPS))


@pytest.mark.parametrize(("prior", "drafts"), [(CPU_PRIOR, False), (GPU_PRIOR, True)])
def test_assumed_step_costs_depend_on_the_device(prior: DevicePrior, drafts: bool) -> None:
    """On a GPU, drafts are tried in large batches, although no step with drafts was measured."""
    drafter = SpeculativeDrafter(8, costs=StepCosts(prior))
    for _ in range(10):
        drafter.record_step(64, 0, 0.005)
    sequences = [make_sequence([1, *TEXT, 2], [3, *TEXT[:6]]) for _ in range(64)]
    assert bool(drafter.propose(sequences, 64, MAX_ROWS - 64)) == drafts
