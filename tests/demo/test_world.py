"""Demo data: training and test texts are disjoint, and expected answers are correct."""

import json
import random
import re
import sqlite3
import subprocess
import sys

import pytest

from demo import muddle
from demo.corpus import ASSISTANT, END, GAZETTEER, HEROES, REPEATS, SPECIAL_TOKENS, USER, write_documents
from demo.grammar import COMMON_WORDS, GRAMMAR, QUESTIONS, bare, find_pattern, make_world
from demo.skills import NOTHING_TO_DO, PIRATE_CRIES, SKILLS, Item, write_items
from demo.train import write_examples
from demo.world import NEGATIVE, NEUTRAL, POSITIVE, Event, World, is_held_out

pytestmark = pytest.mark.slow

WORDS = re.compile(r"\w+")
# Fields whose values are split into training and test.
SPLIT_FIELDS = ("person", "town", "item", "colour", "count", "price")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Return base model training documents."""
    return write_documents(5, 6_000)


@pytest.fixture(scope="module")
def training_set(documents: list[str]) -> list[str]:
    """Return the training documents of the base model and all adapters."""
    return [*documents, *(" ".join(example) for name in SKILLS for example in write_examples(name, 6, 500))]


@pytest.fixture(scope="module")
def held_out_set() -> list[Item]:
    return write_items(7, 1_000, held_out=True)


@pytest.mark.slow
def test_training_data_excludes_test_words(training_set: list[str], held_out_set: list[Item]) -> None:
    known = {word for text in training_set for word in WORDS.findall(text)}
    values = {str(getattr(item.note.event, field)) for item in held_out_set for field in SPLIT_FIELDS}
    words = {word for value in values for word in value.split()}
    assert len(words) > 2_000
    assert not words & known


def test_only_common_words_overlap_with_test_split(training_set: list[str]) -> None:
    """Held-out words in training data are common English words that no test name uses."""
    texts = re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), " ", " ".join(training_set))
    words = {word.lower() for word in WORDS.findall(texts)}
    assert {word for word in words if is_held_out(word)} <= COMMON_WORDS


@pytest.mark.parametrize("rule", ["event", "who", "about_feeling", "about_nothing", "aside", *map(str, QUESTIONS)])
def test_sentence_patterns_belong_to_one_split(rule: str) -> None:
    rules = GRAMMAR | {"feeling": POSITIVE.words, "opposite": NEGATIVE.words}
    rules |= {str(key): patterns for key, patterns in QUESTIONS.items()}
    rules["start"] = rules[rule]
    worlds = [World(random.Random(2), held_out=held_out) for held_out in (False, True)]
    training_set, held_out_set = ({find_pattern(world, "<start>", rules) for _ in range(2_000)} for world in worlds)
    assert held_out_set
    assert not training_set & held_out_set


@pytest.mark.slow
def test_training_data_excludes_test_sentences() -> None:
    """Compare complete texts from all generators."""
    training_set = {kind for item in write_items(6, 20_000, held_out=False) for kind in sentence_patterns(item)}
    held_out_set = {kind for item in write_items(7, 4_000, held_out=True) for kind in sentence_patterns(item)}
    assert len(held_out_set) > 5_000
    assert not training_set & held_out_set


def sentence_patterns(item: Item) -> list[str]:
    """Return an item's sentences without values, unknown words and gender."""
    return [_generalize(text, item.note.event) for text in (*item.note.sentences, item.question.text)]


def _generalize(text: str, event: Event) -> str:
    for field in ("person", "town", "item", "colour"):
        text = re.sub(rf"\b{getattr(event, field)}\b", f"{{{field}}}", text)
    words = [{"he": "she", "him": "her", "woman": "man"}.get(word, word) for word in bare(text).split()]
    return " ".join(word if word in COMMON_WORDS or "{" in word else "{word}" for word in words)


def test_sentence_matching_ignores_formatting() -> None:
    rules = GRAMMAR | {"feeling": POSITIVE.words, "opposite": NEGATIVE.words}
    for held_out in (False, True):
        world = World(random.Random(3), held_out=held_out)
        for part in ("<event>", "<about_feeling>", "<about_nothing>", "<aside>"):
            for _ in range(500):
                pattern = find_pattern(world, part, rules)
                assert muddle.is_sentence(part, pattern)
                assert muddle.is_sentence(part, re.sub(r" +", " ", pattern.replace("{word}", "made").lower()))
    assert not muddle.is_sentence("<aside>", "It market was wet.")


def test_training_data_contains_noise() -> None:
    rules, world = GRAMMAR | {"feeling": POSITIVE.words, "opposite": NEGATIVE.words}, make_world(4)
    patterns = [find_pattern(world, "<event>", rules) for _ in range(1_000)]
    changed = [pattern for pattern in patterns if muddle.muddle(world, "<event>", pattern) != pattern]
    assert 0.2 < len(changed) / len(patterns) < 0.5


def test_splits_have_enough_examples(held_out_set: list[Item]) -> None:
    items = write_items(9, 1_000, held_out=False)
    for field, fewest in (
        ("person", 900),
        ("town", 900),
        ("item", 300),
        ("colour", 300),
        ("count", 10),
        ("price", 100),
    ):
        for side in (items, held_out_set):
            assert len({getattr(item.note.event, field) for item in side}) >= fewest, field
    for sentiment in (POSITIVE, NEGATIVE, NEUTRAL):
        assert sum(item.note.event.sentiment is sentiment for item in held_out_set) > 250


def test_items_are_deterministic() -> None:
    code = "from demo.skills import write_items; print(write_items(3, 20, held_out=True))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert repr(write_items(3, 20, held_out=True)) == runs[0].stdout.strip()


def test_notes_are_well_formed(held_out_set: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muddle, "MUDDLED", 0)
    for item in (*held_out_set, *write_items(4, 1_000, held_out=False)):
        note = item.note.text
        assert not re.search(r"[<>{}!]|  |,[.:,]|\bthem (made|did|are|came)\b| ,", item.text), item.text
        assert all(sentence[:1].isupper() or sentence[:1].isdigit() for sentence in note.split(". ")), note


# --- Expected answers --------------------------------------------------------------------------------------------


def test_queries_return_expected_answer(held_out_set: list[Item]) -> None:
    """Run the queries in a real database that contains other purchases."""
    with sqlite3.connect(":memory:") as tables:
        tables.execute("CREATE TABLE people (name TEXT, town TEXT)")
        tables.execute(
            "CREATE TABLE orders (person TEXT, item TEXT, colour TEXT, count INTEGER, day TEXT, price INTEGER)"
        )
        for item in held_out_set:
            event = item.note.event
            tables.execute("INSERT INTO people VALUES (?, ?)", (event.person, event.town))
            row = (event.person, event.item, event.colour, event.count, event.day, event.price)
            tables.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", row)
        for item in held_out_set:
            result = {str(value) for (value,) in tables.execute(SKILLS["sql"](item))}
            assert str(getattr(item.note.event, item.question.wanted)) in result
            assert len(result) < 20


def test_answers_occur_in_note(held_out_set: list[Item]) -> None:
    for item in held_out_set:
        assert SKILLS["answer"](item) in item.note.text
        fields = json.loads(SKILLS["json"](item))
        assert all(str(value) in item.note.text for value in fields.values())
        assert all(str(value) in SKILLS["pirate"](item) for value in fields.values())


def test_redacted_text_contains_no_names(held_out_set: list[Item]) -> None:
    for item in held_out_set:
        text = SKILLS["redact"](item)
        assert not re.search(rf"\b({item.note.event.person}|{item.note.event.town})\b", text)
        assert text.replace("[NAME]", item.note.event.person).replace("[TOWN]", item.note.event.town) == item.text
        assert "[NAME]" in text
        assert "[TOWN]" in text


def test_sentiment_follows_from_words(held_out_set: list[Item]) -> None:
    """A note contains a word for its sentiment, or a negated word for the opposite sentiment."""
    for item in held_out_set:
        words = set(WORDS.findall(item.note.text))
        good, bad = words & set(POSITIVE.words), words & set(NEGATIVE.words)
        if "not" in words:
            good, bad = bad, good
        assert (bool(good), bool(bad)) == (item.note.event.sentiment is POSITIVE, item.note.event.sentiment is NEGATIVE)


# --- Base model texts -------------------------------------------------------------------------------------------


def test_training_data_has_no_template_markers(training_set: list[str]) -> None:
    for text in training_set:
        bare = re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), "", text)
        assert not re.search(r"[<{]\w|[A-Za-z][>}]", bare), text


def test_base_model_data_contains_no_task_answers(documents: list[str]) -> None:
    """Base model texts contain no expected task answers, unless the user requests those words literally."""
    turns = [
        result
        for text in documents
        for result in re.findall(
            rf"{re.escape(USER)}(.*?){re.escape(END + ASSISTANT)}(.*?)(?={re.escape(END)})", text, re.DOTALL
        )
    ]
    assert len(turns) > 2_000
    own = [turn for turn in turns if not any(form.format(turn[1]) == turn[0] for form in REPEATS)]
    assert len(own) > 1_000
    for asked, answered in own:
        assert answered not in asked  # unlike answers about a note
        assert answered not in ("positive", "negative", "neutral", *NOTHING_TO_DO.values())
        assert not answered.startswith(("{", "SELECT", *PIRATE_CRIES.values()))
        assert "[NAME]" not in answered


def test_facts_are_consistent_across_texts() -> None:
    assert len(GAZETTEER.towns) == 16
    assert len(GAZETTEER.people) == 24
    assert all(town in GAZETTEER.towns for _, town, _ in GAZETTEER.people.values())
    assert not any(is_held_out(name.split()[0].lower()) for name in GAZETTEER.people)
    assert not any(is_held_out(name.lower()) for name in HEROES)
