"""The demo world: people, places, items, and their split into training and test words.

A hash assigns every name, item, color and number to one split: four in five to training, the rest to testing.
"""

import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ONSETS = _words(
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk sl sm sn sp st t th tr v w y z"
)
VOWELS = _words("a e i o u a e i o u ai ea ee oo ou")
ACCENTED = _words("á à â ä å é è ê ë í ï ó ô ö ø ú ü")
CODAS = _words("b ck d ff g l ll m n nd ng nk nt p r rd rk rn s sh sk st t th x")
ENDS = ("", *CODAS, *CODAS, *(f"{coda}{end}" for coda in CODAS for end in ("e", "y", "o")))
FAMILY_TAILS = _words("ev er ley man by ford kin low sen well wright ton ide ock ash ney over is um ett")
TOWN_TAILS = _words(
    "wick ton ford bury dale haven mere field port gate moor stead bridge cliff den ham hollow wood worth sea"
)

GOODS = _words(
    "lamps chairs spoons plates cups bowls hats scarves gloves boots coats blankets pillows candles baskets "
    "buckets ropes ladders hammers nails brushes brooms clocks mirrors pictures books pens pencils bells drums "
    "flutes whistles kites balls dolls boats wagons saddles tents lanterns rugs curtains shelves benches stools "
    "tables desks trunks boxes jars bottles pots pans knives forks trays combs ribbons buttons belts purses rings "
    "bracelets beads vases pitchers barrels crates shovels rakes hoes seeds apples pears plums cherries carrots "
    "onions turnips pumpkins cheeses loaves cakes pies biscuits maps stamps cards puzzles masks cloaks aprons "
    "sandals socks shirts kettles umbrellas anvils goblets mittens harps violins hammocks tulips melons cabbages "
    "thimbles quilts compasses telescopes sledges acorns spades wreaths bonnets marbles tiles bricks wheels"
)
COLOURS = _words(
    "red blue green yellow white black brown grey pink purple orange silver golden cream "
    "crimson turquoise violet beige scarlet amber teal indigo maroon"
)
# Signs, accents, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Hiragana, Han, Hangul, emoji: small letters, where there
# are large ones.
FOREIGN = (
    *((0x21, 0x2F), (0xE0, 0xF6), (0x3B1, 0x3C1), (0x430, 0x44F), (0x5D0, 0x5EA), (0x621, 0x63A), (0x905, 0x939)),
    *((0x3041, 0x3096), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F)),
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

COUNT_DIGITS, PRICE_DIGITS = 3, 4  # at most


class Sentiment(NamedTuple):
    """A buyer's feeling about the goods."""

    name: str
    words: tuple[str, ...]


POSITIVE = Sentiment(
    "positive",
    ("happy", "delighted", "pleased", "thrilled", "glad", "overjoyed", "charmed", "satisfied", "content", "proud"),
)
NEGATIVE = Sentiment(
    "negative",
    ("upset", "angry", "disappointed", "annoyed", "unhappy", "furious", "sad", "cross", "bitter", "dismayed"),
)
NEUTRAL = Sentiment("neutral", ())
SENTIMENTS = (POSITIVE, NEGATIVE, NEUTRAL)


@dataclass(frozen=True)
class Event:
    """A purchase, the subject of every note."""

    person: str
    is_woman: bool
    town: str
    item: str
    colour: str
    count: int
    day: str
    price: int
    sentiment: Sentiment


def is_held_out(word: str) -> bool:
    """Return True for one word in five, the same words on every machine."""
    return zlib.crc32(word.encode()) % 5 == 0


KNOWN_GOODS, KNOWN_COLOURS = (tuple(word for word in words if not is_held_out(word)) for words in (GOODS, COLOURS))


class World:
    """Words from one split: training or test."""

    def __init__(self, rng: random.Random, *, held_out: bool = False, avoided: frozenset[str] = frozenset()) -> None:
        self.rng = rng
        self.held_out = held_out
        self._avoided = avoided

    def event(self) -> Event:
        return Event(
            person=self.person(),
            is_woman=self.rng.random() < 0.5,
            town=self.town(),
            item=self.item(),
            colour=self.colour(),
            count=self.number(COUNT_DIGITS),
            day=self.rng.choice(DAYS),
            price=self.number(PRICE_DIGITS),
            sentiment=self.rng.choice(SENTIMENTS),
        )

    def person(self) -> str:
        return f"{self.first_name()} {self.family_name()}"

    def first_name(self) -> str:
        return self.word().capitalize()

    def family_name(self) -> str:
        return self._place_or_family(FAMILY_TAILS)

    def town(self) -> str:
        return self._place_or_family(TOWN_TAILS)

    def word(self) -> str:
        return self._new(self._word)

    def letters(self) -> str:
        """Return random letters."""
        return self._new(lambda: "".join(self.rng.choices(string.ascii_lowercase, k=self.rng.randint(2, 5))))

    def foreign(self) -> str:
        """Return a word in another script."""
        first, last = self.rng.choice(FOREIGN)
        return self._new(lambda: "".join(chr(self.rng.randint(first, last)) for _ in range(self.rng.randint(1, 8))))

    def verb(self) -> str:
        """Return a verb for a person's action."""
        return self._new(lambda: f"{self._word()}ed")

    def item(self) -> str:
        """Return a common item or an item that only exists in this world."""
        if self.rng.random() < 0.4:
            return self._new(lambda: self._word() + self.rng.choice(("s", "s", "es")))
        return self._new(lambda: self.rng.choice(GOODS))

    def colour(self) -> str:
        if self.rng.random() < 0.4:
            return self.word()
        return self._new(lambda: self.rng.choice(COLOURS))

    def number(self, most_digits: int = PRICE_DIGITS) -> int:
        """Return a number of at least two. Short numbers are as common as long numbers."""
        return int(self._new(lambda: str(self._number(self.rng.randint(1, most_digits)))))

    def _place_or_family(self, tails: tuple[str, ...]) -> str:
        """Return an invented name, often with a typical ending."""
        if self.rng.random() < 0.3:
            return self.word().capitalize()
        return self._new(lambda: self._start() + self.rng.choice(CODAS) + self.rng.choice(tails)).capitalize()

    def _new(self, make: Callable[[], str]) -> str:
        """Draw words until one belongs to this split."""
        while True:
            word = make()
            if is_held_out(word) == self.held_out and word not in self._avoided:
                return word

    def _word(self) -> str:
        """Return an invented word with one to three syllables."""
        chance, pick = self.rng.random, self.rng.choice
        if chance() < 0.1:
            return self._blend()
        word = pick(VOWELS)[:1] + pick(CODAS)[:1] if chance() < 0.15 else ""
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2))):
            word += self._start() + (pick(CODAS) if chance() < 0.3 else "")
        word += self._start()
        return word + pick(ENDS)

    def _blend(self) -> str:
        """Return a word blended from two common words."""
        first, last = self.rng.sample(KNOWN_GOODS + KNOWN_COLOURS, 2)
        return first[: self.rng.randint(2, 4)] + last[-self.rng.randint(2, 5) :]

    def _start(self) -> str:
        vowels = VOWELS if self.rng.random() > 0.02 else ACCENTED
        return self.rng.choice(ONSETS) + self.rng.choice(vowels)

    def _number(self, digits: int) -> int:
        return self.rng.randrange(max(2, 10 ** (digits - 1)), 10**digits)
