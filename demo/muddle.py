"""Perturbed training sentences. They keep the model from replacing unseen sentences with memorized ones."""

import re
from functools import cache

from demo.grammar import FEELINGS, GRAMMAR, QUESTIONS, bare
from demo.world import World

MUDDLED, CHANGED = 0.4, 0.2  # shares of sentences, and of the words of such a one
# Words that determine the expected completion.
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
    """Return a pattern of <part>, sometimes with removed, inserted or replaced words.

    Results that are valid grammar sentences are discarded, because they could be test sentences.
    """
    if world.rng.random() > MUDDLED:
        return pattern
    kept = KEPT_IN_QUESTIONS if part == "<question>" else KEPT
    words = [
        new for place, word in enumerate(pattern.split()) for new in _change(world, word, kept, is_first=place == 0)
    ]
    return pattern if is_sentence(part, " ".join(words)) else " ".join(words)


def is_sentence(part: str, pattern: str) -> bool:
    """Return True if the grammar can produce the sentence for <part> in either split."""
    return _spell_out(part).fullmatch(bare(pattern)) is not None


def _change(world: World, word: str, kept: frozenset[str], *, is_first: bool) -> list[str]:
    """Return a replacement. Never replace the first word with an invented word, which would look like a name."""
    rng, stem = world.rng, word.rstrip(".,:?")
    if rng.random() > CHANGED or not stem.isalpha() or stem.lower() in kept:
        return [word]
    new = rng.choice(_list_fillers(kept)) if is_first or rng.random() < 0.5 else world.word()
    what = rng.choice(("replace", "replace", "put in", "leave out"))
    if what == "replace":
        return [new + word[len(stem) :]]
    if what == "put in":
        return [new, word]
    return [word] if word != stem else []  # keep the full stop


@cache
def _list_fillers(kept: frozenset[str]) -> list[str]:
    return sorted(FILLERS - kept)


@cache
def _spell_out(text: str) -> re.Pattern[str]:
    """Return the grammar as a regular expression over bare patterns, ignoring spaces."""
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
