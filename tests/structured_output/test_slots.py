"""The memory that the engine shares with the processes that follow structures, and the messages about it."""

import gc
import mmap
import os
import pickle
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from lorax_server.errors import BusyError
from lorax_server.structured_output import wire
from lorax_server.structured_output.grammars import from_json_schema, from_regex
from lorax_server.structured_output.matchers import Compiled, Ending
from lorax_server.structured_output.matchers import Follower as Matcher
from lorax_server.structured_output.program import StructureProgram
from lorax_server.structured_output.slots import KEPT_SLOTS, MaskSlots, WrittenSlots
from lorax_server.structured_output.structures import KNOWN, MANY, MAX_PROCESSES, Next, Structures, find_num_processes
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import load_tokenizer
from tests.e2e.wire import wait_for
from tests.models.tiny import EOS_ID, SERVED, make_model, make_tokenizer, save
from tests.structured_output.test_hostile import Follower, choose

LETTERS = from_regex("[a-z]{30,40}")


def count_memories() -> int:
    """Count the shared memories that this process has mapped or open."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().count("lorax-masks")
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return mapped + sum("lorax-masks" in os.readlink(link) for link in links if link.is_symlink())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, named = count_memories(), set(os.listdir("/dev/shm"))
    yield
    assert count_memories() == before
    assert not [name for name in set(os.listdir("/dev/shm")) - named if "mask" in name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), make_model(SERVED["llama"]()), make_tokenizer())


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(load_tokenizer(model))


@pytest.fixture
def follower(model: Path) -> Iterator[Follower]:
    structures = Structures(model)
    yield Follower(structures)
    structures.close()


def begin(follower: Follower) -> int:
    request_id = follower.begin(LETTERS)
    assert follower.settle(request_id) is None
    return request_id


def test_a_mask_is_read_where_it_was_written() -> None:
    slots = MaskSlots()
    written = WrittenSlots.open(slots.file, 4).masks
    slots.open(3)
    written[7] = 1, -1, 2**31 - 1, 9
    read = slots.read(7)
    assert read.tolist() == [1, -1, 2**31 - 1]
    assert not slots.read(8).any()
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 0
    slots.close()
    written[7] = 5
    assert read.tolist() == [5, 5, 5], "what somebody holds stays"


def test_the_lowest_slot_that_is_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorax_server.structured_output.slots.MAX_SLOTS", 3)
    slots = MaskSlots()
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BusyError, match="3 answers"):
        slots.take()
    slots.give_back(2)
    slots.give_back(1)
    assert [slots.take() for _ in range(2)] == [1, 2]
    slots.close()


def test_slots_are_free_again_when_answers_end(follower: Follower) -> None:
    structures, random = follower.structures, np.random.default_rng(0)
    first, second = begin(follower), begin(follower)
    ((process,),) = structures._processes.values()
    assert process.slot_of == {first: 0, second: 1}
    assert follower.advance(first, random)
    structures.end(first)  # its mask may be on its way
    third = begin(follower)
    assert process.slot_of == {second: 1, third: 0}
    found = structures.gather([second, third], 60.0)
    assert np.array_equal(found[second].words, found[third].words)  # both are at their beginning
    for request_id in (second, third):
        structures.end(request_id)
    assert not process.slot_of


def count_bytes(file: int) -> int:
    """Count the bytes of memory that a file without a name takes."""
    return os.fstat(file).st_blocks * 512


@pytest.mark.parametrize("row_words", [10, 1023, 1024, 4009], ids=["many in a page", "less", "a page", "four pages"])
def test_memory_of_many_answers_is_given_back_when_they_end(row_words: int) -> None:
    """What others use stays as it is, and so does what few answers need again and again."""
    slots, random = MaskSlots(), np.random.default_rng(0)
    written = WrittenSlots.open(slots.file, row_words)
    count, kept = KEPT_SLOTS + 500, {17, KEPT_SLOTS, KEPT_SLOTS + 100, KEPT_SLOTS + 499}
    for turn in range(2):
        for slot in range(count):
            if not turn or slot not in kept:
                written.take(slot)
                written.masks[slot] = slot + 1
        assert count_bytes(slots.file) >= count * row_words * 4
        for slot in random.permutation(count).tolist():
            if slot not in kept:
                written.give_back(slot)
        pages = -(-row_words * 4 // mmap.PAGESIZE) + 1  # of a slot, at most
        most = -(-KEPT_SLOTS * row_words * 4 // mmap.PAGESIZE) + 3 * pages
        assert count_bytes(slots.file) <= most * mmap.PAGESIZE
        assert all((written.masks[slot] == slot + 1).all() for slot in (*kept, *range(KEPT_SLOTS)))
    slots.close()


def test_a_process_gives_back_the_memory_of_answers_that_have_ended(follower: Follower) -> None:
    structures, count = follower.structures, 3 * KEPT_SLOTS
    answers = [begin(follower) for _ in range(count)]
    ((process,),) = structures._processes.values()
    in_use, row_bytes = count_bytes(process.slots.file), structures.gather(answers[:1], 60.0)[answers[0]].words.nbytes
    assert in_use >= count * row_bytes
    for request_id in answers[:-1]:
        structures.end(request_id)
    wait_for(lambda: count_bytes(process.slots.file) <= KEPT_SLOTS * row_bytes + 4 * mmap.PAGESIZE, "it is given back")
    assert follower.advance(answers[-1], np.random.default_rng(0))
    structures.end(answers[-1])


def test_an_ended_process_leaves_no_memory_and_the_next_has_its_own(follower: Follower) -> None:
    structures, random = follower.structures, np.random.default_rng(0)
    ended = begin(follower)
    ((process,),) = structures._processes.values()
    mask = structures.gather([ended], 60.0)[ended].words
    before, memories = mask.copy(), count_memories()
    process.kill()
    while not structures.has_news:
        assert follower.news.wait(60)
        follower.news.clear()
    assert np.array_equal(mask, before), "the engine may be reading it"
    structures.end(ended)
    del mask
    following = begin(follower)
    assert list(structures._processes.values()) != [[process]]
    assert count_memories() == memories
    assert follower.advance(following, random)
    structures.end(following)


def test_nobody_waits_for_a_process_that_does_not_read(follower: Follower) -> None:
    structures = follower.structures
    request_id = begin(follower)
    ((process,),) = structures._processes.values()
    process._process.send_signal(signal.SIGSTOP)
    for number in range(20_000):
        process.send(wire.End(10**6 + number, 0))
    assert process._num_unsent > 0
    structures.advance(
        [(request_id, choose(structures.gather([request_id], 60.0)[request_id].words, np.random.default_rng(0)))]
    )
    process._process.send_signal(signal.SIGCONT)
    assert structures.gather([request_id], 60.0), "the token came after all else"
    wait_for(lambda: process._num_unsent == 0, "the thread that sends has noticed")
    structures.end(request_id)


def test_tokens_of_several_messages_are_taken_together(vocabulary: Vocabulary) -> None:
    random, (ours, theirs) = np.random.default_rng(0), Pipe()
    program = StructureProgram(theirs, vocabulary, WrittenSlots(vocabulary.make_masks(3)))
    program._grammars[LETTERS.grammar] = Compiled.of(vocabulary, LETTERS.grammar)
    for request_id in range(3):
        program._begin(wire.Begin(request_id, request_id, LETTERS.grammar, (EOS_ID,), (), 0))
        ours.recv_bytes()
    for request_id in range(3):
        token_id = choose(program._followers[request_id].words, random)
        ours.send_bytes(pickle.dumps(wire.Advance([(request_id, token_id)])))
    ours.send_bytes(pickle.dumps(wire.End(1, 1)))
    program._read()
    masks = pickle.loads(ours.recv_bytes())
    assert masks.request_ids == [0, 2]
    assert masks.took_s >= 0
    assert not ours.poll()
    for connection in (ours, theirs):
        connection.close()


def test_the_order_of_tokens_in_the_library_changes_no_mask(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr("lorax_server.structured_output.vocabulary.SLICES", None)  # the library's own
    plain, random = Vocabulary(load_tokenizer(model)), np.random.default_rng(0)
    for schema in ({"type": "string", "maxLength": 12}, {"type": "array", "items": {"type": ["string", "number"]}}):
        grammar, ending = from_json_schema(schema).grammar, Ending((EOS_ID,), (), 20)
        ours, theirs = (
            Matcher(each, Compiled.of(each, grammar), ending, each.make_masks(1)) for each in (vocabulary, plain)
        )
        for _ in range(12):
            assert np.array_equal(ours.words, theirs.words)
            token_id = choose(ours.words, random)
            if token_id == EOS_ID:
                break
            ours.consume(token_id)
            theirs.consume(token_id)


def test_masks_have_few_processes_where_the_model_needs_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, on_cpu, on_gpu in ((1, 1, 1), (2, 1, 1), (8, 1, 2), (16, 2, 4), (200, MAX_PROCESSES, MAX_PROCESSES)):
        monkeypatch.setattr("lorax_server.structured_output.structures.count_cores", lambda cores=cores: cores)
        assert (find_num_processes("cpu"), find_num_processes("cuda:1")) == (on_cpu, on_gpu)


@pytest.fixture
def shared(model: Path) -> Iterator[Follower]:
    """Two processes that have started, with many answers."""
    structures = Structures(model, 2)
    follower = Follower(structures)
    for _ in range(MANY):
        begin(follower)
    begin(follower)
    (processes,) = structures._processes.values()
    wait_for(lambda: all(process.slots.is_open for process in processes), "both have started")
    yield follower
    structures.close()


def count_answers(follower: Follower) -> list[int]:
    (processes,) = follower.structures._processes.values()
    return [len(process.slot_of) for process in processes]


def test_another_process_is_started_when_there_are_many_answers(model: Path) -> None:
    structures = Structures(model, 3)
    follower = Follower(structures)
    for num_answers in range(1, 2 * MANY + 2):
        begin(follower)
        (processes,) = structures._processes.values()
        assert len(processes) == min(3, 1 + (num_answers - 1) // MANY)
    structures.close()


def test_processes_share_answers_and_one_that_knows_the_grammar_has_a_few_more(shared: Follower) -> None:
    structures, random = shared.structures, np.random.default_rng(0)
    first, _ = count_answers(shared)
    assert first >= MANY
    answers = [begin(shared) for _ in range(2 * MANY)]
    assert max(count_answers(shared)) - min(count_answers(shared)) <= 1, "both know it now"
    digits = from_regex("[0-9]{30}")
    one = shared.begin(digits)
    knows = structures._of_request[one]
    others = [shared.begin(digits) for _ in range(KNOWN - 1)]
    assert all(structures._of_request[each] is knows for each in others)
    for request_id in (one, *others):
        assert shared.settle(request_id) is None
    found = structures.gather([one, *others, *answers], 60.0)
    assert len({found[each].words.tobytes() for each in answers}) == 1, "whoever has computed them"
    for request_id in answers:
        assert shared.advance(request_id, random)


def test_when_one_of_several_processes_ends_the_answers_of_others_go_on(shared: Follower) -> None:
    structures, random = shared.structures, np.random.default_rng(0)
    answers = [begin(shared) for _ in range(2 * MANY)]
    (processes,) = structures._processes.values()
    gone, stays = processes
    gone.kill()
    failing = set(gone.slot_of)
    wait_for(lambda: all(structures._next.get(each) is None for each in failing), "its answers have failed")
    for request_id in failing:
        structures.end(request_id)
    for request_id in set(answers) - failing:
        assert shared.advance(request_id, random)
    assert begin(shared)
    (processes,) = structures._processes.values()
    assert stays in processes
    assert gone not in processes


class Clock:
    """Time that passes only while somebody waits, and what is known after how long."""

    def __init__(self, structures: Structures, known: dict[float, int]) -> None:
        self.now, self._structures, self._known = 100.0, structures, known

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None: ...

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        after = min(self._known, default=float("inf"))
        if after <= self.now - 100.0 + seconds:
            self.now = 100.0 + after
            self._structures._next[self._known.pop(after)] = Next(np.zeros(1, np.int32), [])
        else:
            self.now += seconds


@pytest.mark.parametrize(
    ("num_ready", "known", "named", "waited_s", "num_found"),
    [
        pytest.param(0, {}, {}, 0.05, 0, id="nobody could choose"),
        pytest.param(0, {0.03: 1}, {}, 0.03, 1, id="nobody could, until"),
        pytest.param(0, {}, {"num_others": 1}, 0.004, 0, id="somebody without a mask could"),
        pytest.param(3, {}, {}, 0.004, 3, id="a long step"),
        pytest.param(3, {}, {"step_s": 0.006}, 0.002, 3, id="one of four is late"),
        pytest.param(3, {}, {"step_s": 0.006, "num_others": 3}, 0.001, 3, id="one of seven is late"),
        pytest.param(3, {0.0015: 4}, {"step_s": 0.006}, 0.0015, 4, id="it comes in time"),
        pytest.param(3, {}, {"step_s": 0.0}, 0.0, 3, id="a step that takes no time"),
    ],
)
def test_a_step_waits_as_long_as_that_costs_less_than_the_late_ones_lose(
    num_ready: int,
    known: dict[float, int],
    named: dict[str, float],
    waited_s: float,
    num_found: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    structures = Structures(tmp_path)
    clock = Clock(structures, {**known})
    structures._next = {number + 1: Next(np.zeros(1, np.int32), []) for number in range(num_ready)}
    monkeypatch.setattr(structures, "_changed", clock)
    monkeypatch.setattr("lorax_server.structured_output.structures.time", clock)
    found = structures.gather(range(1, num_ready + 2), 0.004, 0.05, **named)  # type: ignore[arg-type]
    assert clock.now - 100.0 == pytest.approx(waited_s)
    assert len(found) == num_found


def test_fewer_late_answers_have_less_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    structures = Structures(tmp_path)
    clock = Clock(structures, {0.001: 1})
    structures._next = {3: Next(np.zeros(1, np.int32), []), 4: Next(np.zeros(1, np.int32), [])}
    monkeypatch.setattr(structures, "_changed", clock)
    monkeypatch.setattr("lorax_server.structured_output.structures.time", clock)
    assert len(structures.gather([1, 2, 3, 4], 0.1, 0.1, step_s=0.006)) == 3
    assert clock.now - 100.0 == pytest.approx(0.002), "at first 0.006, then a third of that"


def test_a_further_process_that_cannot_start_leaves_others_as_they_are(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    structures = follower.structures
    structures._num_processes = 2
    answers = [begin(follower) for _ in range(MANY)]
    (before,) = structures._processes.values()

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("lorax_server.structured_output.structures.StructureProcess", fail)
    answers += [begin(follower) for _ in range(3)]
    assert list(structures._processes.values()) == [before]
    assert len(before) == 1
    for request_id in answers:
        structures.end(request_id)


def test_a_further_process_that_cannot_be_used_leaves_others_as_they_are(shared: Follower) -> None:
    structures = shared.structures
    (processes,) = structures._processes.values()
    stays, useless = processes
    structures._take(useless, wire.Unusable("its tokenizer is gone"))
    useless.kill()
    wait_for(lambda: useless.is_gone, "it has ended")
    begin(shared)
    begin(shared)
    assert list(structures._processes.values()) == [[stays]], "and no other one is started for a while"
