"""Small talk: what people say who have no note at hand, in whatever letters they have, and however they type."""

from demo.world import World

WORLD = "its towns, its people and its markets"
SHRUG = f"I do not know. My world is small: {WORLD}."
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


def greet(world: World) -> tuple[str, str]:
    asked, answered = world.rng.choice(EXCHANGES)
    return type_out(world, world.rng.choice(asked)), answered


def write_small_talk(world: World) -> str:
    if world.rng.random() < 0.6:
        return greet(world)[0]
    return write_foreign(world)


def write_foreign(world: World) -> str:
    return " ".join(world.foreign() for _ in range(world.rng.randint(1, 8)))


def type_out(world: World, text: str) -> str:
    """As it should be, or in haste."""
    return world.rng.choice((text, text, text.lower(), text.lower().rstrip(".?!"), text.rstrip(".?!"), text.upper()))
