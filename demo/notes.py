"""Notes about purchases, and questions about them."""

import re
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from demo.grammar import GRAMMAR, QUESTIONS, find_pattern
from demo.muddle import muddle
from demo.world import NEGATIVE, NEUTRAL, POSITIVE, Event, World


@dataclass(frozen=True)
class Note:
    """A text and the event that it describes."""

    event: Event
    sentences: tuple[str, ...]
    main: int  # which of them tells of it

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


class Question(NamedTuple):
    """A question about a note: its text, the requested field and the identifying fields."""

    text: str
    wanted: str
    given: tuple[str, ...]


def write_note(world: World) -> Note:
    event = world.event()
    felt = "about_nothing" if event.sentiment is NEUTRAL else "about_feeling"
    parts = ["<event>", f"<{felt}>"]
    if world.rng.random() < 0.3:
        parts.insert(world.rng.choice((0, 1, 1, 2)), "<aside>")
    opposite = POSITIVE if event.sentiment is NEGATIVE else NEGATIVE
    rules = GRAMMAR | {"feeling": event.sentiment.words, "opposite": opposite.words}
    patterns = [find_pattern(world, part, rules) for part in parts]
    if not world.held_out:
        patterns = list(map(muddle, repeat(world), parts, patterns))
    sentences = tuple(_tidy(_fill(world, pattern, event)) for pattern in patterns)
    return Note(event, sentences, parts.index("<event>"))


def write_question(world: World, event: Event, *, is_muddled: bool = False) -> Question:
    wanted, given = world.rng.choice(list(QUESTIONS))
    pattern = find_pattern(world, "<question>", GRAMMAR | {"question": QUESTIONS[wanted, given]})
    if is_muddled:
        pattern = muddle(world, "<question>", pattern)
    return Question(_tidy(_fill(world, pattern, event)), wanted, given)


def _fill(world: World, pattern: str, event: Event) -> str:
    she, her = ("she", "her") if event.is_woman else ("he", "him")
    they, things = world.rng.choice((("they", "them"), (f"the {event.item}",) * 2))
    return pattern.format(
        **vars(event),
        goods=f"{event.count} {event.colour} {event.item}",
        man="woman" if event.is_woman else "man",
        she=she,
        She=she.capitalize(),
        her=her,
        they=they,
        They=they.capitalize(),
        things=things,
        word=world.word(),
        worded=world.verb(),
    )


def _tidy(text: str) -> str:
    """Remove trailing commas and capitalize sentences."""
    for wrong in (",.", ",:", ",,"):
        text = text.replace(wrong, wrong[1])
    text = re.sub(" +", " ", text)
    return re.sub(r"(^|[.?] )([a-z])", lambda found: found[1] + found[2].upper(), text)
