"""Random requests to the demo adapters, with any combination of parameters."""

import random
from typing import Any, NamedTuple

from demo.skills import write_items
from lorax_server.cli.demo import DEMO_FOLDER
from lorax_server.structured_output.grammars import from_choices, from_json_schema, from_regex
from lorax_server.types import SamplingParams, StopParams, Structure

MODEL, ADAPTERS = DEMO_FOLDER / "model", DEMO_FOLDER / "adapters"
NAMES: tuple[str | None, ...] = (None, *sorted(folder.name for folder in ADAPTERS.iterdir()))
SCHEMA = {
    "type": "object",
    "properties": {
        "person": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "grey"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["person", "colour", "count"],
    "additionalProperties": False,
}
STRUCTURES = (
    from_json_schema(SCHEMA),
    from_regex(r"(SELECT|DELETE) [a-z]{1,6}( FROM [a-z]{1,8})?;"),
    from_choices(["positive", "negative", "neither of the two"]),
)


class RandomRequest(NamedTuple):
    """The arguments of `LLM.generate` for one prompt."""

    prompt: str
    params: SamplingParams
    stop: StopParams
    adapter: str | None
    structure: Structure | None


def make_prompt(text: str) -> str:
    return f"<|user|>{text}<|end|><|assistant|>"


def make_requests(count: int, seed: int) -> list[RandomRequest]:
    rng, items = random.Random(seed), write_items(seed, count, held_out=True)
    return [_make_request(rng, item.text) for item in items]


def _make_request(rng: random.Random, text: str) -> RandomRequest:
    def maybe(probability: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < probability else {}

    sampled: dict[str, Any] = {"do_sample": True, "temperature": rng.choice([0.3, 0.8, 1.5])}
    params = SamplingParams(
        seed=rng.getrandbits(64),
        **(sampled if rng.random() < 0.6 else {}),
        **maybe(0.3, top_k=rng.randint(1, 50)),
        **maybe(0.3, top_p=rng.uniform(0.5, 1.0)),
        **maybe(0.1, min_p=0.05),
        **maybe(0.1, typical_p=0.8),
        **maybe(0.2, repetition_penalty=rng.choice([0.8, 1.2])),
        **maybe(0.2, frequency_penalty=rng.uniform(-0.5, 0.5), presence_penalty=0.3),
        **maybe(0.1, logit_bias={rng.randrange(500): rng.uniform(-5, 5)}),
        **maybe(0.1, watermark=True),
        **maybe(0.2, num_alternatives=3),
        **maybe(0.1, raw_logprobs=True),
    )
    structure = rng.choice(STRUCTURES) if rng.random() < 0.4 else None
    max_new_tokens = rng.randint(1, 60)
    stop = StopParams(
        max_new_tokens=max_new_tokens,
        **maybe(0.1, min_new_tokens=min(max_new_tokens, 5)),
        **maybe(0.2, stop_strings=(rng.choice(["a", "the", '", "', " = "]),), include_stop=rng.random() < 0.5),
        **maybe(0.1, stop_token_ids=frozenset(rng.sample(range(500), 20))),
        **({} if structure else maybe(0.1, ignore_eos=True)),
    )
    return RandomRequest(make_prompt(text), params, stop, rng.choice(NAMES), structure)
