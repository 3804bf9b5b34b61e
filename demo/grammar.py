"""Grammar for notes and questions, and its split into training and test patterns.

A hash assigns each sentence pattern (without names and numbers) to one split, so no test pattern appears in training
texts. Alternatives that start with `!` are only used in tests.
"""

import random
import re

from demo.world import DAYS, NEGATIVE, POSITIVE, World, is_held_out

# <name>: one alternative with that name. {name}: an event field, a pronoun, or {goods}. {word} and {worded}: invented
# words, so that models learn to handle unknown words.
GRAMMAR: dict[str, tuple[str, ...]] = {
    "event": (
        "<who> <bought> <goods> <on> <for>.",
        "<who> <bought> <goods> <for> <on>.",
        "<who> <bought> <goods> <on> and paid {price} coins.",
        "<On> <who> <bought> <goods> and paid {price} coins.",
        "<On> <who> <bought> <goods> <for>.",
        "<On> <who> <paid> {price} coins for <goods>.",
        "<who> <paid> {price} coins for <goods> <on>.",
        "<who> spent {price} coins on <goods> <on>.",
        "<On>, {price} coins were paid by <who> for <goods>.",
        "For {price} coins <who> <bought> <goods> <on>.",
        "For <goods> we got {price} coins from <who> <on>.",
        "For <goods> {price} coins were paid by <who> <on>.",
        "It was {day} when <who> <bought> <goods> <for>.",
        "It was {day} when <who> <paid> {price} coins for <goods>.",
        "<goods> <were_sold> to <who> <on> <for>.",
        "<goods> <were_sold> to <who> <for> <on>.",
        "<On> <goods> <were_sold> to <who> <for>.",
        "<goods> were bought by <who> <on> <for>.",
        "<seller> sold <goods> to <who> <on> <for>.",
        "<On> <seller> sold <goods> to <who> <for>.",
        "<seller> sold <goods> to <who> <on>. <The_price>",
        "<who> <bought> <goods> <on>. <The_price>",
        "<On> <who> <bought> <goods>. <The_price>",
        "<who> <bought> <goods> <for>. That was <on>.",
        "<who> <came> <on> and <bought> <goods> <for>.",
        "<who> <came> <on>. There {she} <bought> <goods> <for>.",
        "<who> had {price} coins. <On> {she} spent them on <goods>.",
        "<who> wanted <goods>. <On> {she} <paid> {price} coins for them.",
        "<goods> were ready <on>. <who> <paid> {price} coins for them.",
        "<On> we had a visit from <who>: <goods> <for>.",
        "{day}: <who>, <goods>, {price} coins.",
        "After <a_while> <who> <bought> <goods> <for> <on>.",
        "In the end <who> <bought> <goods> <on>. <The_price>",
        "!For <goods> <who> <paid> {price} coins <on>.",
        "!It was {day} when <goods> <were_sold> to <who> <for>.",
        "!Everything was ready <on>, and <who> <bought> <goods> <for>.",
    ),
    "goods": ("{goods}", "{goods}", "{goods}", "{goods} <at>"),
    "who": (
        "{person} from {town}",
        "{person} of {town}",
        "{person}, who <lives> {town},",
        "{person}, a <trade> from {town},",
        "{person}, the <trade> of {town},",
        "our <friend> {person} from {town}",
        "the <trade> {person} from {town}",
        "an old <trade> from {town}, {person},",
        "{person}, whose house is in {town},",
        "{person} (from {town})",
        "a <friend> from {town} named {person}",
        "{person}, a <friend> from {town},",
        "!our <trade> {person}, who <lives> {town},",
        "!{person}, an old <friend> from {town},",
    ),
    "lives": (
        *("lives in", "comes from", "has a shop in", "came all the way from", "is at home in", "has a {word} in"),
        "!has a house in",
    ),
    "friend": ("friend", "{man}", "guest", "cousin", "traveller", "{word}", "!neighbour"),
    "trade": (
        *(
            "baker",
            "farmer",
            "sailor",
            "weaver",
            "smith",
            "painter",
            "teacher",
            "miller",
            "fisher",
            "tailor",
            "gardener",
            "{word}",
            "{word}",
        ),
        "!doctor",
    ),
    "bought": (
        *("bought", "ordered", "picked up", "purchased", "took home", "chose", "carried away", "came for", "asked for"),
        *("got", "found", "loaded", "bought", "bought", "{worded}", "!carried home", "!picked"),
    ),
    "paid": ("paid", "gave", "paid us", "counted out", "!gave us"),
    "came": ("came to <shop>", "went to <shop>", "stood in <shop>", "walked to <shop>", "!went into <shop>"),
    "shop": ("the market", "the shop", "the square", "our shop", "the harbour", "the {word}"),
    "seller": ("we", "the market", "the shop", "a trader", "our shop", "the <trade>"),
    "were_sold": ("were sold", "went", "were sent", "were given", "were brought", "were {worded}", "!were carried"),
    "on": ("on {day}", "last {day}", "on {day} <part_of_day>", "!early on {day}"),
    "On": ("On {day}", "Last {day}", "On {day} <part_of_day>", "!Late on {day}"),
    "part_of_day": ("morning", "evening", "at noon"),
    "for": ("for {price} coins", "at a price of {price} coins", "for just {price} coins"),
    "The_price": (
        *("The price was {price} coins.", "{She} paid {price} coins.", "That was {price} coins."),
        *("They cost {price} coins.", "!{She} paid a price of {price} coins."),
    ),
    "a_while": ("a long talk", "an hour", "a short walk", "the rain", "the {word}"),
    "at": (
        *("at the market", "by the bridge", "near the tower", "at the harbour", "behind the mill", "at the {word}"),
        "!at the gate",
    ),
    "about_feeling": (
        "{She} was <very> <feeling> <with>.",
        "{She} is <very> <feeling> <with>.",
        "<Now> {she} was <very> <feeling>.",
        "<Now> {she} was <very> <feeling> <with>.",
        "{She} felt <very> <feeling> <later>.",
        "{They} made {her} <very> <feeling>.",
        "<Now> {they} made {her} <very> <feeling>.",
        "{She} <said> that {she} was <very> <feeling>.",
        "{She} <said> that {they} made {her} <feeling>.",
        "{She} looked <very> <feeling> when {she} opened the box.",
        "{She} was <feeling>, <very> <feeling>.",
        "{She} was not <opposite> <with>.",
        "{They} did not make {her} <opposite>.",
        "A neighbour says {she} is <very> <feeling>.",
        "!When {she} came home, {she} was <very> <feeling>.",
        "!A neighbour <said> that {they} made {her} <feeling>.",
    ),
    "very": ("", "", "very", "quite", "really", "so", "truly", "rather"),
    "with": ("with {things}", "about {things}", "at home", "about the price", "with the colour"),
    "later": ("afterwards", "at home", "later", "the whole day", "!in the end"),
    "Now": (
        *("Now", "In the evening", "At home", "All day long", "At first", "After that", "Later", "After the {word}"),
        "!Afterwards",
    ),
    "said": ("said", "told us", "wrote", "told the <trade>", "!told everybody"),
    "about_nothing": (
        "{She} <put> {things} <there>.",
        "<Now> {she} <put> {things} <there>.",
        "{They} are now <there>.",
        "{She} will give {things} to a <friend>.",
        "{She} went home with {things} by cart.",
        "{They} came in a box.",
        "{She} needs {things} for the house.",
        "{She} said nothing more.",
        "A <friend> helped {her} to carry {things}.",
        "{She} <said> where {they} stand.",
        "When {she} came home, {she} <put> {things} <there>.",
        "!A <friend> will keep {things}.",
        "!{She} went home by the long road.",
    ),
    "put": (
        *("put", "left", "stored", "opened", "washed", "counted", "unpacked", "wanted to keep", "hid", "{worded}"),
        "!placed",
    ),
    "there": (
        *("on the shelf", "under the roof", "in the kitchen", "by the door", "in the garden", "behind the house"),
        *("near the river", "under the table", "in the {word}", "by the {word}", "!under the shelf"),
    ),
    "aside": (
        "It rained <there>.",
        "It was <weather>.",
        "The market was full of people.",
        "The weather was <weather>.",
        "The road was long.",
        "The shop closed early.",
        "There was music <at>.",
        "The <trade> waved from the door.",
        "A <trade> stood <there>.",
        "A cart stood <at>.",
        "!The road was full of people.",
        "!There was rain <at>.",
    ),
    "weather": ("fine", "cold", "windy", "warm", "wet", "cold and windy", "{word}"),
    "tell": ("Tell me", "Say", "Please tell me", "I would like to know", "Do you know", "!Please say"),
    "were_the": ("were the", "were"),
    "buy": ("buy", "take home", "choose", "get", "!pick up"),
}
# Keyed by requested field and given field.
QUESTIONS: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    ("count", ("person", "item")): (
        "How many {item} did {person} <buy>?",
        "How many {item} <were_sold> to {person}?",
        "What is the number of {item} that {person} <bought>?",
        "<tell> how many {item} {person} has now.",
        "<tell> how many {item} {person} <bought>.",
        "<tell> the number of {item} that {person} <bought>.",
        "Of the {item}, how many did {person} <buy>?",
        "{person} <bought> {item}. How many?",
    ),
    ("colour", ("person", "item")): (
        "What colour are the {item} that {person} <bought>?",
        "Which colour are the {item} of {person}?",
        "Which colour did {person} choose for the {item}?",
        "<tell> the colour of the {item} of {person}.",
        "<tell> what colour the {item} of {person} are.",
        "In what colour did {person} <buy> the {item}?",
        "{person} <bought> {item}. What colour are they?",
    ),
    ("day", ("person", "item")): (
        "On which day did {person} <buy> the {item}?",
        "When did {person} <buy> {item}?",
        "<tell> the day when {person} <bought> the {item}.",
        "<tell> when {person} <bought> {item}.",
        "What day was it when {person} <bought> the {item}?",
        "{person} <bought> {item}. When was that?",
        "On what day <were_the> {item} sold to {person}?",
    ),
    ("price", ("person", "item")): (
        "How much did {person} pay for the {item}?",
        "How many coins did {person} spend on {item}?",
        "What was the price of the {item} that {person} <bought>?",
        "<tell> how much {person} spent on the {item}.",
        "<tell> what {person} <paid> for the {item}.",
        "What did the {item} of {person} cost?",
        "For how many coins did {person} <buy> the {item}?",
        "{person} <bought> {item}. How much were they?",
    ),
    ("town", ("person",)): (
        "Where does {person} live?",
        "Where does {person} come from?",
        "Which town does {person} come from?",
        "In which town does {person} live?",
        "<tell> where {person} lives.",
        "<tell> the town of {person}.",
        "<tell> which town {person} comes from.",
        "Where is the house of {person}?",
        "In which town is the house of {person}?",
        "<tell> where the house of {person} is.",
    ),
    ("person", ("item", "day")): (
        "Who <bought> {item} on {day}?",
        "On {day}, who <bought> {item}?",
        "<tell> who <bought> {item} on {day}.",
        "<tell> the name of who <bought> the {item} on {day}.",
        "Somebody <bought> {item} on {day}. Who was it?",
        "To whom <were_the> {item} sold on {day}?",
    ),
    ("person", ("town", "item")): (
        "Who from {town} <bought> {item}?",
        "<tell> who from {town} <bought> {item}.",
        "<tell> who in {town} has the {item} now.",
        "Which person from {town} <bought> {item}?",
        "Who lives in {town} and <bought> {item}?",
        "Somebody from {town} <bought> {item}. Who was it?",
        "To whom in {town} <were_the> {item} sold?",
    ),
    ("item", ("person", "day")): (
        "What did {person} <buy> on {day}?",
        "On {day}, what did {person} <buy>?",
        "<tell> what {person} <bought> on {day}.",
        "Which goods did {person} <buy> on {day}?",
        "{person} <bought> something on {day}. What was it?",
        "<tell> what was sold to {person} on {day}.",
    ),
}

FEELINGS = (*POSITIVE.words, *NEGATIVE.words)
# Common English words, which must not become test names.
OTHER_WORDS = """
    ago ask be can dog donkey doubloons goat hello hen ho knows list look model nice o one see send shall shared talked
    than thank then these time towns
"""
COMMON_WORDS = frozenset(
    word.lower()
    for texts in (*GRAMMAR.values(), *QUESTIONS.values(), FEELINGS, DAYS, (OTHER_WORDS,))
    for text in texts
    for word in re.findall(r"[A-Za-z]+", text)
)


def make_world(seed: int, *, held_out: bool = False) -> World:
    """Create a world whose invented words do not collide with common words in notes."""
    return World(random.Random(seed), held_out=held_out, avoided=COMMON_WORDS)


def find_pattern(world: World, text: str, rules: dict[str, tuple[str, ...]]) -> str:
    """Return a sentence pattern from this split, with placeholders for names and numbers."""
    while True:
        pattern = _expand(world, text, rules)
        if (is_held_out(bare(pattern)) or "!" in pattern) == world.held_out:
            return pattern.replace("!", "")


def bare(pattern: str) -> str:
    """Return only the words. Patterns with the same words count as equal."""
    return " ".join(re.findall(r"(?:[^\W\d_]|[{}])+", pattern.lower()))


def _expand(world: World, text: str, rules: dict[str, tuple[str, ...]]) -> str:
    """Replace every <name>. Marks for test-only alternatives are kept."""
    while "<" in text:
        text = re.sub(r"<(\w+)>", lambda found: world.rng.choice(rules[found[1]]), text)
    return text
