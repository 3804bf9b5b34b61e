"""The load of `gpu_soak.py`: requests of all kinds, changes of adapters, and how they are sent."""

import asyncio
import itertools
import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_model import ModelShape, make_adapter
from soak import Server, read_body

HEAD = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "connection: close\r\n{more}\r\n"
)
STATUS = re.compile(rb"HTTP/1.1 (\d+) ")
HASH = re.compile(rb"\r\nx-adapter-hash: (\S+)")
ANSWER_S = 120
LONGEST_PROMPT, LONGEST_ANSWER = 300, 64
WORDS = ("the", "kite", "from", "harbour", "bought", "seven", "amber", "lanterns", "on", "Friday", "and", "was")
NUM_CHANGED = 6  # adapters whose files are rewritten; the first ones
NUM_PINNED = 3  # adapters that are pinned now and then; the next ones
PAUSE_S = 0.2  # between two changes
GREEDY, DRAWN, BY_RULES = "greedy, checked", "drawn, checked", "drawn by rules, checked"
ERROR = re.compile(rb'"error":["{]')
KINDS = {  # and how many of a hundred requests are of it
    "stream": 30,
    "dropped": 15,
    "whole": 20,
    "details": 8,
    "best of": 3,
    "chat": 8,
    "several": 8,
    "wrong": 6,
    "broken adapter": 2,
}


class Asked(NamedTuple):
    """A request. `dropped_after` so many tokens its client leaves; `status` is the one that it must get."""

    kind: str
    path: str
    body: Any
    dropped_after: int | None = None
    status: int = 200


class Answer(NamedTuple):
    """The answer to a request, or what is wrong with it."""

    content: Any = None
    problem: str = ""
    adapter_hash: bytes = b""

    @property
    def tokens(self) -> list[dict[str, Any]]:
        tokens: list[dict[str, Any]] = self.content["details"]["tokens"]
        return tokens

    @property
    def prompt(self) -> list[dict[str, Any]]:
        prompt: list[dict[str, Any]] = self.content["details"]["prefill"]
        return prompt


# --- Requests ---------------------------------------------------------------------------------------------------------


def make_request(choice: random.Random, names: Sequence[str], is_checked: bool) -> Asked:
    adapter = choice.choice([None, *names])
    if is_checked:
        return make_checked(choice, adapter)
    kind = choice.choices(list(KINDS), list(KINDS.values()))[0]
    prompt, count = make_prompt(choice), choice.randint(1, LONGEST_ANSWER)
    if kind == "wrong":
        return make_wrong(choice, prompt)
    if kind == "broken adapter":
        return Asked(kind, "/generate", make_body(prompt, "broken", count, {}), status=424)
    if kind in ("chat", "several"):
        return make_openai(choice, kind, prompt, adapter or "", count)
    dropped_after = choice.randint(0, count) if kind == "dropped" else None
    rules = draw_rules(choice)
    if kind == "details":
        rules |= {"decoder_input_details": True, "return_k_alternatives": choice.randint(1, 20)}
    if kind == "best of":
        rules = {**rules, "do_sample": True, "best_of": choice.randint(2, 4), "details": True, "seed": None}
    path = "/generate_stream" if kind in ("stream", "dropped") else "/generate"
    return Asked(kind, path, make_body(prompt, adapter, count, rules), dropped_after)


def make_openai(choice: random.Random, kind: str, prompt: str, model: str, count: int) -> Asked:
    if kind == "chat":
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": count}
        more = choice.choice([{}, {"stream": True}, {"logprobs": True, "top_logprobs": 3}, {"temperature": 0.7}])
        return Asked(kind, "/v1/chat/completions", {**body, **more})
    body = {"model": model, "prompt": [prompt, make_prompt(choice)], "max_tokens": count}
    more = {"n": choice.randint(1, 4), "stream": choice.random() < 0.5, "logprobs": choice.choice([None, 2])}
    return Asked(kind, "/v1/completions", {**body, **more})


def make_checked(choice: random.Random, adapter: str | None) -> Asked:
    """Make a request whose answer can be compared: greedy, or drawn by a seed, with and without further rules."""
    more = {"details": True, "decoder_input_details": True, "return_k_alternatives": 20}
    kind = choice.choice([GREEDY, DRAWN, BY_RULES])
    rules = {} if kind == GREEDY else {"do_sample": True, "seed": choice.randrange(2**31)}
    if kind == BY_RULES:
        rules = draw_rules(choice) | rules
    body = make_body(make_prompt(choice), adapter, choice.randint(4, LONGEST_ANSWER), {**rules, **more})
    return Asked(kind, "/generate", body)


def draw_rules(choice: random.Random) -> dict[str, Any]:
    """Draw some of all rules of sampling; none for every third request."""
    if choice.random() < 1 / 3:
        return {}
    rules: dict[str, Any] = {
        "temperature": round(choice.uniform(0.3, 1.5), 2),
        "top_k": choice.randint(1, 100),
        "top_p": round(choice.uniform(0.3, 0.99), 2),
        "typical_p": round(choice.uniform(0.3, 0.99), 2),
        "min_p": round(choice.uniform(0.0, 0.2), 2),
        "repetition_penalty": round(choice.uniform(0.8, 1.5), 2),
        "frequency_penalty": round(choice.uniform(-1.0, 1.0), 2),
        "presence_penalty": round(choice.uniform(-1.0, 1.0), 2),
        "logit_bias": {str(choice.randrange(256, 600)): choice.uniform(-5, 5)},
        "watermark": True,
        "stop": ["ab", " c"],
    }
    chosen = choice.sample(list(rules), choice.randint(1, 4))
    return {"do_sample": True, "seed": choice.randrange(2**31)} | {name: rules[name] for name in chosen}


def make_prompt(choice: random.Random) -> str:
    """Make a prompt, often one that begins like others."""
    length = choice.randint(1, LONGEST_PROMPT)
    words = itertools.cycle(WORDS) if choice.random() < 0.3 else iter(lambda: choice.choice(WORDS), None)
    text = ""
    while len(text) < length:
        text += next(words) + " "
    return text[:length] + str(choice.randrange(100))


def make_body(prompt: str, adapter: str | None, count: int, rules: dict[str, Any]) -> dict[str, Any]:
    named = {} if adapter is None else {"adapter_id": adapter}
    return {"inputs": prompt, "parameters": {**named, **rules, "max_new_tokens": count}}


def make_wrong(choice: random.Random, prompt: str) -> Asked:
    """Make a request that must be refused."""
    wrong = [
        (make_body("", None, 5, {}), 422),
        (make_body(prompt, None, 5, {"temperature": -1.0}), 422),
        (make_body(prompt, None, 5, {"top_p": 2.0}), 422),
        (make_body("long " * 1000, None, 5, {}), 422),
        (make_body(prompt, None, 10**9, {}), 422),
        (make_body(prompt, "nobody", 5, {}), 424),
        (make_body(prompt, None, 5, {"grammar": "root ::= x"}), 422),
        ("not an object", 422),
    ]
    body, status = choice.choice(wrong)
    return Asked("wrong", "/generate", body, status=status)


# --- Changes of adapters ----------------------------------------------------------------------------------------------


async def make_changes(server: Server, folder: Path, names: Sequence[str], shape: ModelShape, key: str) -> str:
    """Rewrite, load, pin and unload adapters, one after the other; return the first problem."""
    choice = random.Random()
    for number in itertools.count():
        name = choice.choice(names)
        match number % 4:
            case 0:
                target = choice.choice(names[:NUM_CHANGED])
                await asyncio.to_thread(rewrite, folder, target, shape, choice.randrange(2**31))
                continue
            case 1:
                asked = Asked("load", "/v1/adapters/load", {"adapter_id": name})
            case 2:
                name = choice.choice(names[NUM_CHANGED : NUM_CHANGED + NUM_PINNED])
                asked = Asked("pin", "/v1/adapters/load", {"adapter_id": name, "pin": choice.random() < 0.5})
            case _:
                asked = Asked("unload", "/v1/adapters/unload", {"adapter_id": name})
        answer = await send(server, asked, key)
        if answer.problem:
            return f"{asked.kind} {name}: {answer.problem}"
        await asyncio.sleep(PAUSE_S)
    return ""


def rewrite(folder: Path, name: str, shape: ModelShape, seed: int) -> None:
    """Give an adapter other weights, in one step, as tools that replace files should."""
    made = folder.with_name("rewritten") / name
    make_adapter(made, shape, seed)
    (made / "adapter_model.safetensors").replace(folder / name / "adapter_model.safetensors")
    shutil.rmtree(made)


# --- Sending ----------------------------------------------------------------------------------------------------------


async def send(server: Server, asked: Asked, key: str = "") -> Answer:
    try:
        return await asyncio.wait_for(_send(server, asked, key), ANSWER_S)
    except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
        return Answer(problem=f"{type(error).__name__}: {str(error)[:300]}")


async def _send(server: Server, asked: Asked, key: str) -> Answer:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        content = json.dumps(asked.body).encode()
        more = f"authorization: Bearer {key}\r\n" if key else ""
        head = HEAD.format(path=asked.path, host=server.host, length=len(content), more=more)
        writer.write(head.encode() + content)
        if asked.dropped_after == 0:
            return Answer()
        head_bytes = await reader.readuntil(b"\r\n\r\n")
        body = await read_body(reader, asked.dropped_after)
    finally:
        writer.transport.abort()
    status, found = STATUS.match(head_bytes), HASH.search(head_bytes)
    if status is None or int(status[1]) != asked.status:
        return Answer(problem=(head_bytes[:40] + b" ... " + body[:300]).decode(errors="replace"))
    is_json = b"\r\ncontent-type: application/json" in head_bytes
    if not is_json and ERROR.search(body):  # the last event of a stream
        return Answer(problem=body[-300:].decode(errors="replace"))
    return Answer(json.loads(body) if is_json else None, "", found[1] if found else b"")
