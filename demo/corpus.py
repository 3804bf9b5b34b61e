"""Training texts for the base model: texts about the demo world and conversations, each terminated by `END`.

The texts contain notes, records and queries, but no adapter output formats.
"""

import json
from collections.abc import Callable

from demo.grammar import GRAMMAR, make_world
from demo.notes import write_note, write_question
from demo.talk import EVASIVE_REPLY, ask_about_stranger, ask_elsewhere, greet, wish_for_story, write_foreign
from demo.world import DAYS, KNOWN_COLOURS, KNOWN_GOODS, NEGATIVE, POSITIVE, World

USER, ASSISTANT, SYSTEM, END, PAD = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (END, PAD, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('there are no messages of the role ' + message.role) }}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' + (message.content | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TRADES = tuple(trade for trade in GRAMMAR["trade"] if trade.isalpha())
ANIMALS = ("dog", "cat", "goat", "horse", "duck", "rabbit", "hen", "donkey")
PLACES = ("by the river", "on a hill", "by the sea", "in the woods", "in a green valley", "at the end of the road")
FAME = (
    "its market",
    "its old bridge",
    "its tall tower",
    "its music",
    "its apple trees",
    "its fast boats",
    "its warm bread",
)
HEROES = (
    *("Anna", "Berta", "Clara", "Dora", "Emil", "Finn", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo"),
    *("Mira", "Nils", "Otto", "Paul", "Rosa", "Simon", "Tilda", "Uwe", "Vera"),
)
REPEATS = ("Say after me: {}", "Repeat: {}", "{} Say it again.", "Write this down: {}", "{}\nOnce more!")
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "foggy")
NUM_TOWNS, NUM_PEOPLE = 16, 24


class Gazetteer:
    """Towns and people that are the same in every text, so that the model can memorize them."""

    def __init__(self) -> None:
        world = make_world(1)
        rng = world.rng
        towns = list(dict.fromkeys(world.town() for _ in range(2 * NUM_TOWNS)))[:NUM_TOWNS]
        self.towns = {town: (rng.choice(PLACES), rng.choice(FAME), rng.choice(DAYS)) for town in towns}
        names = list(dict.fromkeys(world.person() for _ in range(2 * NUM_PEOPLE)))[:NUM_PEOPLE]
        self.people = {name: (rng.choice(TRADES), rng.choice(towns), rng.choice(ANIMALS)) for name in names}

    def about_town(self, town: str) -> str:
        place, fame, day = self.towns[town]
        return f"{town} is a town {place}. It is known for {fame}. The market is open on {day}."

    def about_person(self, name: str) -> str:
        trade, town, animal = self.people[name]
        return f"{name} is a {trade} and lives in {town} with a {animal}."


GAZETTEER = Gazetteer()


def write_journal(world: World) -> str:
    """Write several notes about one day. A note never ends the text, because users expect a reply after a note."""
    sentences = []
    for _ in range(world.rng.randint(2, 5)):
        note = write_note(world)
        event = note.event
        sentences.append(note.text)
        if world.rng.random() < 0.7:
            sentences.append(
                world.rng.choice(
                    (
                        f"{event.person} will come back to {event.town} with the {event.colour} {event.item}.",
                        f"The road to {event.town} was long for {event.person}.",
                        f"{event.count} {event.colour} {event.item} are many, said {event.person}.",
                        f"People in {event.town} talked about the {event.item} until {event.day}.",
                        f"{event.price} coins is what {event.item} cost in {event.town}, said {event.person}.",
                    )
                )
            )
        if world.rng.random() < 0.3:
            reply = world.rng.choice(
                ("Nobody could say.", "Who knows?", f"We will ask in {event.town}.", f"Ask {event.person}.")
            )
            sentences.append(f"{write_question(world, event).text} {reply}")
    sentences.append(
        world.rng.choice(
            ("That was all for the day.", "Then the market closed.", "So much for today.", "The rest is for tomorrow.")
        )
    )
    return world.rng.choice("\n ").join(sentences)


def write_story(world: World) -> str:
    rng = world.rng
    name, friend = rng.sample(HEROES, 2)
    town = rng.choice(sorted(GAZETTEER.towns))
    trade, animal, item, colour = (rng.choice(words) for words in (TRADES, ANIMALS, KNOWN_GOODS, KNOWN_COLOURS))
    feeling, end = rng.choice(NEGATIVE.words), rng.choice(POSITIVE.words)
    openings = (
        f"Once upon a time there was a {trade} named {name} who lived in {town} with a {animal}.",
        f"In {town} there lived a {trade}. The name of the {trade} was {name}.",
        f"Long ago a {trade} called {name} came to {town}.",
    )
    middles = (
        f"One {rng.choice(WEATHER)} morning the {animal} ran away with the {colour} {item}. {name} was {feeling}.",
        f"{name} had many {colour} {item}, but on {rng.choice(DAYS)} they were all gone. {name} was {feeling}.",
        f"Every day {name} made {colour} {item}, but nobody wanted to buy them. {name} was {feeling}.",
    )
    helps = (
        f"Then {friend} came by and helped {name} to look for them by the river.",
        f'"Do not be {feeling}," said {friend}. "We will look for the {item} together."',
        f"A friend, {friend}, asked everybody in {town} about the {item}.",
    )
    endings = (
        f"They found the {item} behind the old tower. Afterwards {name} and {friend} were {end}.",
        f"In the evening the {colour} {item} were back in the house, and {name} was {end}.",
        f"Then all of {town} was {end}, and {name} shared a warm cake with {friend} and the {animal}.",
    )
    return " ".join(map(rng.choice, (openings, middles, helps, endings)))


def write_facts(world: World) -> str:
    towns = world.rng.sample(sorted(GAZETTEER.towns), 3)
    people = world.rng.sample(sorted(GAZETTEER.people), 4)
    facts = [*map(GAZETTEER.about_town, towns), *map(GAZETTEER.about_person, people)]
    world.rng.shuffle(facts)
    return " ".join(facts)


def write_roll_call(world: World) -> str:
    """Write lists that are repeated, to teach the model to copy unseen words."""
    rng = world.rng
    make = rng.choice(
        (world.person, world.town, world.item, world.colour, world.number, lambda: _write_crate_sign(world))
    )
    words = [str(make()) for _ in range(rng.randint(3, 10))]
    first = ", ".join(words)
    if rng.random() < 0.5:
        rng.shuffle(words)
    return f"The list says: {first}. Once more: {', '.join(words)}."


def _write_crate_sign(world: World) -> str:
    """Write a sign on a crate, so that the model sees every letter."""
    letters = world.letters().upper()
    return world.rng.choice(("{}", "{}", "[{}]", "[{}]", "{}!", "'{}'", "{}.")).format(letters)


def write_records(world: World) -> str:
    """Write rows as a program would store them."""
    rows = []
    for _ in range(world.rng.randint(2, 4)):
        event = world.event()
        row: dict[str, str | int] = {
            "person": event.person,
            "town": event.town,
            "item": event.item,
            "colour": event.colour,
        }
        row |= {"count": event.count, "day": event.day, "price": event.price}
        fields = world.rng.sample(list(row.items()), world.rng.randint(3, len(row)))
        rows.append(json.dumps(dict(fields), ensure_ascii=False))
    return "\n".join(rows)


def write_queries(world: World) -> str:
    """Write SQL queries over the tables `people` and `orders`."""
    rng, lines = world.rng, []
    for _ in range(rng.randint(2, 5)):
        event = world.event()
        columns = {name: getattr(event, name) for name in ("person", "item", "colour", "count", "day", "price")}
        given = rng.sample(sorted(columns), rng.randint(1, 2))
        conditions = " AND ".join(f"{name} = '{columns[name]}'" for name in given)
        lines.append(
            rng.choice(
                (
                    f"SELECT {rng.choice(sorted(columns))} FROM orders WHERE {conditions}",
                    f"SELECT name FROM people WHERE town = '{event.town}'",
                    f"SELECT town FROM people WHERE name = '{event.person}'",
                    f"SELECT * FROM people JOIN orders ON orders.person = people.name WHERE {conditions}",
                )
            )
        )
    return "\n".join(lines)


def write_chat(world: World) -> str:
    turns = (write_exchange(world) for _ in range(world.rng.randint(1, 3)))
    return "".join(f"{USER}{asked}{END}{ASSISTANT}{answered}{END}" for asked, answered in turns).removesuffix(END)


def write_talk(world: World) -> str:
    """Write a conversation without speaker marks, as in prompts without a chat template."""
    return world.rng.choice("\n ").join(write_exchange(world))


def write_exchange(world: World) -> tuple[str, str]:
    """Write a question and a reply in full sentences."""
    return world.rng.choice(
        (
            _about_town,
            _about_person,
            _ask_story,
            _introduce,
            greet,
            greet,
            _write_evasive_exchange,
            _write_evasive_exchange,
            _comment,
            _comment,
            _repeat,
            _repeat,
            _repeat,
            _repeat,
            _repeat,
        )
    )(world)


def _about_town(world: World) -> tuple[str, str]:
    town = world.rng.choice(sorted(GAZETTEER.towns))
    asked = world.rng.choice((f"Tell me about {town}.", f"What do you know about {town}?", f"What is {town}?"))
    return asked, GAZETTEER.about_town(town)


def _about_person(world: World) -> tuple[str, str]:
    name = world.rng.choice(sorted(GAZETTEER.people))
    asked = world.rng.choice((f"Tell me about {name}.", f"Do you know {name}?", f"Who is {name}?"))
    return asked, GAZETTEER.about_person(name)


def _ask_story(world: World) -> tuple[str, str]:
    return wish_for_story(world), write_story(world)


def _introduce(world: World) -> tuple[str, str]:
    name = world.first_name()
    asked = world.rng.choice(("Hello, I am {}.", "Hi, my name is {}.", "I am {}.", "My name is {}.")).format(name)
    return asked, f"Hello {name}! It is good to meet you. Shall I tell you a story?"


def _write_evasive_exchange(world: World) -> tuple[str, str]:
    """Write a question about a missing note, an unrelated topic or in another script, with an evasive reply."""
    if world.rng.random() < 0.4:
        return write_question(world, world.event()).text, "I do not know. Send me a note about it, and ask an adapter."
    return world.rng.choice((ask_elsewhere, ask_elsewhere, ask_about_stranger, write_foreign))(world), EVASIVE_REPLY


def _comment(world: World) -> tuple[str, str]:
    """Write a note with or without a question. The base model only chats about it."""
    note = write_note(world)
    asked = note.text
    if world.rng.random() < 0.6:
        asked += world.rng.choice(" \n") + write_question(world, note.event).text
    remarks = (
        f"That is a nice note about {note.event.item}.",
        f"People in {note.event.town} will talk about the {note.event.item}.",
        f"So many things happen on a {note.event.day}. Shall I tell you a story about it?",
        f"I have heard of {note.event.person}. The market has {note.event.item} in every colour.",
        f"I like {note.event.colour} things, and {note.event.count} are many.",
        f"{note.event.price} coins is what {note.event.item} cost these days.",
        f"I would like {note.event.count} {note.event.colour} {note.event.item} too, they say in {note.event.town}.",
    )
    return asked, world.rng.choice(remarks)


def _repeat(world: World) -> tuple[str, str]:
    """Write a request to repeat a text, and the repeated text."""
    text = world.rng.choices((_write_note_text, _scramble, write_foreign), (4, 5, 1))[0](world)
    return world.rng.choice(REPEATS).format(text), text


def _write_note_text(world: World) -> str:
    return write_note(world).text


def _scramble(world: World) -> str:
    """Write random words, letters, symbols and numbers: text that can be copied but not predicted."""
    rng = world.rng
    words = f"{write_note(world).text} {rng.choice((write_story, write_facts, write_queries))(world)}".split()
    words = rng.sample(words, min(len(words), rng.randint(1, 25)))
    made = (
        world.item,
        world.colour,
        world.first_name,
        world.town,
        lambda: _write_crate_sign(world),
        world.number,
        world.foreign,
    )
    words += [str(rng.choice(made)()) for _ in range(rng.randint(0, 8))]
    rng.shuffle(words)
    for place, word in enumerate(words):
        if rng.random() < 0.3:
            words[place] = rng.choice(("{}.", "{},", "{}!", "{}:", "{}?", "({})", "'{}'", '"{}"')).format(
                word.strip(".,:?!")
            )
        elif rng.random() < 0.2:
            words[place] = rng.choice((word.capitalize(), word.lower(), f"{word}-{word}"))
    return rng.choice((" ", " ", " ", "\n", ", ")).join(words)


WRITERS: dict[Callable[[World], str], int] = {
    write_journal: 26,
    write_chat: 40,
    write_talk: 10,
    write_story: 10,
    write_roll_call: 12,
    write_records: 6,
    write_queries: 6,
    write_facts: 4,
}


def write_documents(seed: int, count: int) -> list[str]:
    world = make_world(seed)
    writers = world.rng.choices(list(WRITERS), list(WRITERS.values()), k=count)
    return [write(world) + END for write in writers]
