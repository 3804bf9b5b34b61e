"""Draft tokens from prompts and from earlier completions."""

from collections.abc import Sequence
from typing import Any

import pytest

from lorax_server.engine.sequence import Sequence as EngineSequence
from lorax_server.engine.speculation.completion_index import ENTRY_BYTES, MAX_HISTORIES, CompletionIndex, Histories
from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from lorax_server.engine.speculation.guess import Accuracy
from lorax_server.engine.speculation.prompt_lookup import MAX_PROMPT_TOKENS, PromptLookup
from lorax_server.engine.speculation.step_costs import GPU_PRIOR_RATIO, PRIOR_RATIO, StepCosts
from lorax_server.types import Request, SamplingParams, StopParams

TEXT = [*range(100, 130)]


def make_sequence(prompt: Sequence[int], completion: Sequence[int] = (), **options: Any) -> EngineSequence:
    request = Request(0, prompt, SamplingParams(), StopParams(max_new_tokens=1000), **options)
    sequence = EngineSequence(request, 0)
    sequence.token_ids += completion
    return sequence


def teach(drafter: SpeculativeDrafter, prompt: Sequence[int], completion: Sequence[int], **options: Any) -> None:
    """Finish a completion. The drafter sees each of its tokens, as the engine does."""
    for length in range(1, len(completion) + 1):
        sequence = make_sequence(prompt, completion[:length], **options)
        drafter.propose(sequence, 1)
    drafter.finish(sequence)


# --- Prompt -----------------------------------------------------------------------------------------------------------


def test_draft_copies_the_prompt() -> None:
    drafter = SpeculativeDrafter(8)
    draft = drafter.propose(make_sequence([1, *TEXT, 2], [3, *TEXT[:6]]), 1)
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
    drafter = SpeculativeDrafter(8)
    teach(drafter, [1, 2], TEXT)
    draft = drafter.propose(make_sequence([3, 2], TEXT[:4]), 1)
    assert draft == TEXT[4 : 4 + len(draft)]
    assert len(draft) > 1


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter_identity": "new"}, {"salt": "s"}], ids=str)
def test_histories_are_separate(other: dict[str, str]) -> None:
    """A completion influences no other tenant, no other version of the adapter, and no other cache salt."""
    known = {"tenant": "a", "adapter_identity": "old"}
    taught, fresh = SpeculativeDrafter(8), SpeculativeDrafter(8)
    for _ in range(3):
        teach(taught, [1, 2], TEXT, **known)
    for length in (1, 4, 9):
        options = known | other
        one, two = (make_sequence([3, 2], TEXT[:length], **options) for _ in range(2))
        assert taught.propose(one, 1) == fresh.propose(two, 1) == []
    assert taught.propose(make_sequence([3, 2], TEXT[:4], **known), 1)


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
    drafter = SpeculativeDrafter(8, histories=Histories(max_tenants=1))
    sequences = [make_sequence([1, 2], TEXT, tenant=tenant) for tenant in "ab"]
    for sequence in sequences:
        drafter.propose(sequence, 2)
    for sequence in sequences:
        drafter.finish(sequence)
    assert drafter.propose(make_sequence([3, 2], TEXT[:4], tenant="b"), 1)


# --- Length -----------------------------------------------------------------------------------------------------------


def measured(drafter: SpeculativeDrafter, fixed_s: float, per_token_s: float) -> None:
    for _ in range(50):
        for num_sequences, num_drafted in ((1, 0), (1, 3), (4, 0), (4, 12)):
            seconds = fixed_s + per_token_s * (num_sequences + num_drafted)
            drafter.record_step(num_sequences, num_drafted, seconds)


@pytest.mark.parametrize(("fixed_s", "num_running", "drafts"), [(1.0, 1, True), (1.0, 200, False), (0.0, 1, False)])
def test_drafts_are_proposed_only_if_step_costs_allow_savings(fixed_s: float, num_running: int, drafts: bool) -> None:
    """Without fixed costs per step, or on a large batch, a draft token costs as much as a step without it."""
    drafter = SpeculativeDrafter(8)
    measured(drafter, fixed_s, 0.1)
    for _ in range(3):
        teach(drafter, [1, 2], TEXT)
    assert bool(drafter.propose(make_sequence([3, 2], TEXT[:9]), num_running)) == drafts


def test_max_batch_size_and_max_tokens_limit_drafts() -> None:
    drafter = SpeculativeDrafter(2, max_batch_size=4)
    measured(drafter, 1.0, 0.01)
    for _ in range(3):
        teach(drafter, [1, 2], TEXT)
    sequence = make_sequence([3, 2], TEXT[:9])
    assert drafter.propose(sequence, 4) == TEXT[9:11]
    assert drafter.propose(sequence, 5) == []


def test_wrong_guesses_stop_drafts() -> None:
    """The text repeats single tokens, but never what followed them."""
    drafter, tokens = SpeculativeDrafter(8), [index * index % 61 for index in range(61)] * 8
    drafts = [drafter.propose(make_sequence(tokens[:1], tokens[1:2]), 1)]
    sequence = make_sequence(tokens[:1])
    for number in range(400):
        sequence.token_ids.append(tokens[number] + number % 7)
        drafts.append(drafter.propose(sequence, 1))
    assert sum(map(len, drafts[-100:])) < 10


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


def test_step_costs_are_fitted() -> None:
    costs = StepCosts()
    assert costs.in_draft_tokens(1) == pytest.approx((PRIOR_RATIO + 1, 0.1 * (PRIOR_RATIO + 1)))
    for _ in range(200):
        for num_sequences in (1, 8):
            costs.record(num_sequences, 0, 0.02 + 0.002 * num_sequences)
            for num_drafted in (2, 10):
                costs.record(num_sequences, num_drafted, 0.025 + 0.002 * num_sequences + 0.001 * num_drafted)
    assert costs.estimate_plain(4) == pytest.approx(0.028, rel=0.1)
    assert costs.estimate_drafts(4) == pytest.approx((0.005, 0.001), rel=0.2)
    assert costs.in_draft_tokens(4) == pytest.approx((7, 1.25), rel=0.2)
    costs.record(4, 0, 100.0)  # one slow step
    assert costs.estimate_plain(4) < 0.04


def test_first_step_of_each_size_is_measured_if_it_records_no_graph() -> None:
    for records_graphs in (True, False):
        costs = StepCosts(records_graphs=records_graphs)
        costs.record(4, 0, 0.5)
        assert (costs.estimate_plain(4) == pytest.approx(0.5)) == (not records_graphs)


def test_draft_costs_are_measured_again_after_a_while() -> None:
    costs = StepCosts()
    for _ in range(200):
        costs.record(4, 0, 0.01)
        costs.record(4, 4, 0.025)
    before = costs.in_draft_tokens(4)
    for _ in range(8000):
        costs.record(4, 0, 0.01)
    after = costs.in_draft_tokens(4)
    assert before[1] > after[1]


def test_state_of_finished_sequences_is_dropped() -> None:
    drafter, sequence = SpeculativeDrafter(8), make_sequence([1, 2], TEXT)
    drafter.propose(sequence, 1)
    drafter.finish(sequence)
    assert drafter.num_sequences == 0


def test_sequence_waits_only_if_a_draft_is_likely() -> None:
    """With several steps in flight, sequences without drafts do not wait for their tokens."""
    drafter, sequence = SpeculativeDrafter(8), make_sequence([1, 2], [3])
    assert drafter.waits(sequence, 1)
    assert drafter.propose(sequence, 1) == []
    sequence.num_in_flight = 1
    assert not drafter.waits(sequence, 1)
    sequence.token_ids += range(200, 230)  # no token occurs twice
    assert not drafter.waits(sequence, 1)
    sequence.token_ids += [*TEXT, *TEXT[:20]]
    assert drafter.waits(sequence, 1)
    sequence.num_in_flight = 0
    draft = drafter.propose(sequence, 1)
    assert draft == TEXT[20 : 20 + len(draft)]
    assert draft


def test_guesses_of_waiting_sequences_are_checked() -> None:
    """Guesses are checked even if no draft is used, so that accuracy follows a change of the text."""
    drafter, sequence = SpeculativeDrafter(8), make_sequence([1, 2], [*TEXT, 3, *TEXT[:10]])
    assert drafter.propose(sequence, 1)
    sequence.num_in_flight, known = 1, len(sequence.token_ids)
    for number in range(400):
        sequence.token_ids.append(TEXT[number % 7] if number % 2 else 1000 + number)
        drafter.waits(sequence, 1)
    waits = 0
    for number in range(200):
        sequence.token_ids.append(TEXT[number % 7] if number % 2 else 2000 + number)
        waits += drafter.waits(sequence, 1)
    assert len(sequence.token_ids) == known + 600
    assert waits < 10


def test_no_sequence_waits_while_the_batch_is_too_large() -> None:
    drafter, sequence = SpeculativeDrafter(8, max_batch_size=4), make_sequence([1, 2], TEXT)
    drafter.record_step(5, 0, 0.01)
    assert not drafter.waits(sequence, 5)
    drafter.record_step(4, 0, 0.01)
    assert drafter.waits(sequence, 4)


@pytest.mark.parametrize(("prior_ratio", "drafts"), [(PRIOR_RATIO, False), (GPU_PRIOR_RATIO, True)])
def test_assumed_step_costs_depend_on_the_device(prior_ratio: float, drafts: bool) -> None:
    """On a GPU, drafts are tried in large batches, although no step with drafts was measured."""
    drafter = SpeculativeDrafter(8, costs=StepCosts(prior_ratio))
    for _ in range(10):
        drafter.record_step(64, 0, 0.005)
    assert bool(drafter.propose(make_sequence([1, *TEXT, 2], [3, *TEXT[:6]]), 64)) == drafts
