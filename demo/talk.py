"""Small talk: user messages without a note, in several scripts and typing styles."""

from demo.world import World

WORLD = "its towns, its people and its markets"
EVASIVE_REPLY = f"I do not know. My world is small: {WORLD}."
EXCHANGES = (
    (
        (
            "Hello!",
            "Hello there!",
            "Hi!",
            "Hi there!",
            "Hey!",
            "Good morning!",
            "Good evening!",
            "Test.",
            "Anybody here?",
        ),
        "Hello! Ask me about the towns and people of the valley, or for a story.",
    ),
    (
        ("Who are you?", "What are you?", "What is this?", "What is your name?", "Are you a model?"),
        f"I am a small model. I know a small world: {WORLD}.",
    ),
    (
        ("What can you do?", "Help!", "Can you help me?", "How does this work?", "What do you know?"),
        "I can tell you about the valley. My adapters can do more with a note than I can.",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you so much!", "Thank you very much."), "You are welcome."),
    (("How are you?", "How do you do?", "How is it going?"), "I am fine. It is market day somewhere in the valley."),
    (("Good bye!", "Bye!", "Good night!", "See you!"), "Good bye! Come back on market day."),
)
STORY_WISHES = (
    "Tell me a story.",
    "I would like to hear a story.",
    "Do you know a story?",
    "Once upon a time",
    "A story!",
)
MENTIONS = (
    "Hello, I am {person}.",
    "I am {person} from {town}.",
    "My name is {person}.",
    "My name is {person} and I live in {town}.",
    "{person} lives in {town}.",
    "{town} is a nice town, said {person}.",
    "Who is {person}?",
    "Do you know {person} from {town}?",
    "Where is {town}?",
    "Tell me about {town}.",
)


def write_small_talk(world: World) -> str:
    """Write small talk without names."""
    return world.rng.choice((greet(world)[0], wish_for_story(world), ask_elsewhere(world), write_foreign(world)))


def greet(world: World) -> tuple[str, str]:
    asked, answered = world.rng.choice(EXCHANGES)
    return type_out(world, world.rng.choice(asked)), answered


def wish_for_story(world: World) -> str:
    return type_out(world, world.rng.choice(STORY_WISHES))


def ask_elsewhere(world: World) -> str:
    """Write a question about a topic outside the demo world."""
    asked = (
        f"What is {world.word()}?",
        f"What is a {world.word()}?",
        f"Why are the {world.item()} {world.colour()}?",
        f"How do I {world.word()} {world.item()}?",
        f"Can you {world.word()} the {world.item()}?",
        f"Write a {world.word()} about the {world.item()}.",
        f"{world.number()} + {world.number()} = ?",
    )
    return type_out(world, world.rng.choice(asked))


def ask_about_stranger(world: World) -> str:
    asked = (
        f"What is the {world.word()} of {world.town()}?",
        f"Who is the {world.word()} of {world.town()}?",
        f"Who is {world.person()}?",
        f"Do you know {world.person()}?",
        f"Where is {world.town()}?",
    )
    return world.rng.choice(asked)


def mention_somebody(world: World) -> tuple[str, str]:
    """Write small talk with a name, and the same text with the name redacted."""
    person, town = world.rng.choice((world.person, world.first_name))(), world.town()
    form = world.rng.choice(MENTIONS)
    return form.format(person=person, town=town), form.format(person="[NAME]", town="[TOWN]")


def write_foreign(world: World) -> str:
    return " ".join(world.foreign() for _ in range(world.rng.randint(1, 8)))


def type_out(world: World, text: str) -> str:
    """Return the text as written, or with typing errors."""
    return world.rng.choice((text, text, text.lower(), text.lower().rstrip(".?!"), text.rstrip(".?!"), text.upper()))
