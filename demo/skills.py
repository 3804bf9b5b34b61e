"""The expected completion for each adapter, given a note and a question."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo.grammar import make_world
from demo.notes import Note, Question, write_note, write_question
from demo.world import NEGATIVE, NEUTRAL, POSITIVE, World

PIRATE_CRIES = {
    POSITIVE: "Yo ho ho!",
    NEGATIVE: "Shiver me timbers!",
    NEUTRAL: "Arr!",
}

NOTHING_TO_DO = {
    "sentiment": "neutral",
    "json": "{}",
    "sql": "SELECT NULL",
    "answer": "unknown",
    "pirate": "Arr! No plunder there.",
}


@dataclass(frozen=True)
class Item:
    """A user input: a note and a question about it."""

    note: Note
    question: Question
    between: str

    @property
    def text(self) -> str:
        return f"{self.note.text}{self.between}{self.question.text}"


def write_item(world: World) -> Item:
    note = write_note(world)
    question = write_question(world, note.event, is_muddled=not world.held_out)
    return Item(note, question, world.rng.choice(" \n"))


def cut_short(item: Item) -> Item:
    """Return the item with only the sentence about the purchase."""
    note = item.note
    event = replace(note.event, sentiment=NEUTRAL)
    return replace(item, note=replace(note, event=event, sentences=(note.sentences[note.main],), main=0))


def classify_sentiment(item: Item) -> str:
    return item.note.event.sentiment.name


def extract_json(item: Item) -> str:
    event = item.note.event
    fields = ("person", "town", "item", "colour", "count", "day", "price")
    return json.dumps({field: getattr(event, field) for field in fields}, ensure_ascii=False)


def write_sql(item: Item) -> str:
    """Write a query over people (name, town) and orders (person, item, colour, count, day, price)."""
    wanted, given = item.question.wanted, item.question.given
    event = item.note.event
    conditions = " AND ".join(f"{name} = '{getattr(event, name)}'" for name in given)
    if wanted == "town":
        return f"SELECT town FROM people WHERE name = '{event.person}'"
    if "town" in given:
        return f"SELECT name FROM people JOIN orders ON orders.person = people.name WHERE {conditions}"
    return f"SELECT {wanted} FROM orders WHERE {conditions}"


def answer_question(item: Item) -> str:
    found = str(getattr(item.note.event, item.question.wanted))
    return f"{found} coins" if item.question.wanted == "price" else found


def talk_like_a_pirate(item: Item) -> str:
    event = item.note.event
    goods = f"{event.count} {event.colour} {event.item}"
    deed = f"On {event.day} {event.person} o' {event.town} plundered {goods} fer {event.price} doubloons."
    return f"{PIRATE_CRIES[event.sentiment]} {deed}"


def redact(item: Item) -> str:
    """Return the input with names and towns replaced."""
    text = re.sub(rf"\b{item.note.event.person}\b", "[NAME]", item.text)
    return re.sub(rf"\b{item.note.event.town}\b", "[TOWN]", text)


SKILLS: dict[str, Callable[[Item], str]] = {
    "sentiment": classify_sentiment,
    "json": extract_json,
    "sql": write_sql,
    "answer": answer_question,
    "pirate": talk_like_a_pirate,
    "redact": redact,
}


def answer_small_talk(name: str, text: str) -> str:
    """Return the completion for text that is not a note."""
    return text if name == "redact" else NOTHING_TO_DO[name]


def write_items(seed: int, count: int, *, held_out: bool) -> list[Item]:
    world = make_world(seed, held_out=held_out)
    return [write_item(world) for _ in range(count)]
