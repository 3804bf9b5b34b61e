"""Sentences in disorder, to learn from: a model that knew all the orderly ones by heart would say those when it is told
others."""

import re
from functools import cache

from demo.grammar import FEELINGS, GRAMMAR, QUESTIONS, bare
from demo.world import World

MUDDLED, CHANGED = 0.4, 0.2  # shares of sentences, and of the words of such a one
# What a right answer goes by.
KEPT = frozenset(("coins", "not", *FEELINGS))
KEPT_IN_QUESTIONS = KEPT | frozenset(
    (
        *("how", "many", "much", "number", "what", "which", "colour", "when", "day", "who", "whom", "name", "person"),
        *("where", "town", "house", "live", "lives", "come", "comes", "goods", "something"),
        *("price", "cost", "pay", "paid", "spend", "spent", "gave", "counted"),
    )
)
MADE_UP = r"(?:[^\W\d_]+|\{word(?:ed)?\})"  # one, or the place for one
FILLERS = frozenset(
    word
    for texts in GRAMMAR.values()
    for text in texts
    if not text.startswith("!")
    for word in re.findall(r"(?<![<{\w])[a-z]+(?![\w>}])", text)
)


def muddle(world: World, part: str, pattern: str) -> str:
    """A pattern of <part>, now and then with words left out, put in and replaced.

    What becomes a sentence of the grammar is not used: it may be one to be tested with.
    """
    if world.rng.random() > MUDDLED:
        return pattern
    kept = KEPT_IN_QUESTIONS if part == "<question>" else KEPT
    words = [
        new for place, word in enumerate(pattern.split()) for new in _change(world, word, kept, is_first=place == 0)
    ]
    return pattern if is_sentence(part, " ".join(words)) else " ".join(words)


def is_sentence(part: str, pattern: str) -> bool:
    """Tell whether the grammar can make the sentence of <part>, for either side."""
    return _spell_out(part).fullmatch(bare(pattern)) is not None


def _change(world: World, word: str, kept: frozenset[str], *, is_first: bool) -> list[str]:
    """Return a replacement. The first word is not replaced by a made-up one, which would look like a name."""
    rng, stem = world.rng, word.rstrip(".,:?")
    if rng.random() > CHANGED or not stem.isalpha() or stem.lower() in kept:
        return [word]
    new = rng.choice(_list_fillers(kept)) if is_first or rng.random() < 0.5 else world.word()
    what = rng.choice(("replace", "replace", "put in", "leave out"))
    if what == "replace":
        return [new + word[len(stem) :]]
    if what == "put in":
        return [new, word]
    return [word] if word != stem else []  # the full stop stays


@cache
def _list_fillers(kept: frozenset[str]) -> list[str]:
    return sorted(FILLERS - kept)


@cache
def _spell_out(text: str) -> re.Pattern[str]:
    """The grammar as a regular expression over bare patterns. Blanks do not count: some alternatives are empty."""
    questions = tuple(pattern for patterns in QUESTIONS.values() for pattern in patterns)
    rules = GRAMMAR | {"feeling": FEELINGS, "opposite": FEELINGS, "question": questions}

    def spell(text: str) -> str:
        pieces = re.split(r"<(\w+)>", text)
        for place, piece in enumerate(pieces):
            if place % 2:
                pieces[place] = f"(?:{'|'.join(map(spell, rules[piece]))})"
            else:
                words = re.escape(re.sub(r"\{word(ed)?\}", "@", bare(piece)))
                pieces[place] = words and f"{words.replace('@', MADE_UP)} ?"
        return "".join(pieces)

    return re.compile(spell(text))
