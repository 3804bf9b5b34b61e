"""Requests that arrive over time: CausalLM, which lets them join and leave, against transformers' static batches.

32 requests with prompts of 16 to 256 tokens want 16 to 256 tokens each (both log-uniform: most are short, as in real
traffic) and arrive at random times, the same for both sides. generate takes what has arrived, up to the same number of
rows, and starts the next batch when all of it is done. The model is a StableLM of 160M parameters, an architecture that
we have no model of our own for; both sides run the same one.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Record, parse_args, report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StableLmConfig, StableLmForCausalLM
from transformers.utils import logging as transformers_logging

from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.pb import generate_pb2

REQUESTS = 32
MAX_ROWS = 8
LENGTHS = (16, 256)  # tokens, of prompts and of answers
ARRIVALS_PER_S = 4.0  # more than either side can serve, so that there is always a queue but at the start
RUNS = 2
VOCAB = 32000
PEER = "transformers generate, static batches"


@dataclass(frozen=True)
class Wanted:
    """A request of the load, and when it arrives."""

    request_id: int
    prompt: list[int]
    num_tokens: int
    arrival: float


@dataclass
class Served:
    """The tokens of each request and their times, in seconds since it arrived."""

    seconds: float
    first_token: list[float]
    last_token: list[float]
    tokens: dict[int, list[int]]


Serve = Callable[[Sequence[Wanted]], Served]
Shown = dict[int, list[tuple[float, int]]]  # by request: time and token


def main() -> None:
    args = parse_args(__doc__)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    load = make_load()
    total = sum(wanted.num_tokens for wanted in load)
    print(f"{REQUESTS} requests, {total} tokens, at most {MAX_ROWS} at once, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model = CausalLM(folder)
    sides: dict[str, Serve] = {
        "CausalLM": lambda load: serve_joining(model, load),
        "generate": lambda load: serve_static(model, load),
    }
    for serve in sides.values():
        serve(load[:2])  # work that is slow only once
    best: dict[str, Served] = {}
    for run in range(RUNS):
        for name, serve in sides.items():
            served = serve(load)
            print(f"run {run + 1}, {name}: {total / served.seconds:.1f} tokens/s", flush=True)
            if name not in best or served.seconds < best[name].seconds:
                best[name] = served
    report(compare(best["CausalLM"], best["generate"], total), args.json)


def compare(ours: Served, peer: Served, total: int) -> list[Record]:
    ours_first, peer_first = statistics.median(ours.first_token), statistics.median(peer.first_token)
    ours_last, peer_last = statistics.median(ours.last_token), statistics.median(peer.last_token)
    return [
        Record("tokens per second, ours", total / ours.seconds, "tokens/s", "", None),
        Record("tokens per second, peer", total / peer.seconds, "tokens/s", "", None),
        Record("tokens per second", peer.seconds / ours.seconds, "x", PEER, 1.5),
        Record("median time to first token", peer_first / ours_first, "x", PEER, None),
        Record("median time to last token", peer_last / ours_last, "x", PEER, None),
        Record("requests with the same tokens", same_tokens(ours, peer), "of 1", PEER, None),
    ]


def same_tokens(ours: Served, peer: Served) -> float:
    """Return the share of requests with equal tokens: all but those where rounding decides between close logits."""
    return statistics.mean(ours.tokens[i] == tokens for i, tokens in peer.tokens.items())


def make_load() -> list[Wanted]:
    chance = random.Random(0)
    load, arrival = [], 0.0
    for request_id in range(REQUESTS):
        prompt = [chance.randrange(2, VOCAB) for _ in range(log_uniform(chance))]
        load.append(Wanted(request_id, prompt, log_uniform(chance), arrival))
        arrival += chance.expovariate(ARRIVALS_PER_S)
    return load


def log_uniform(chance: random.Random) -> int:
    low, high = LENGTHS
    return round(low * (high / low) ** chance.random())


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = StableLmConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    StableLmForCausalLM(config).half().save_pretrained(folder)
    letters = {letter: i + 2 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def serve_joining(model: CausalLM, load: Sequence[Wanted]) -> Served:
    waiting, batch = list(load), None
    shown: Shown = {wanted.request_id: [] for wanted in load}
    start = time.perf_counter()
    while waiting or batch is not None:
        room = MAX_ROWS - (0 if batch is None else len(batch))
        arrived = take_arrived(waiting, room, start, wait=batch is None)
        batches = [] if batch is None else [batch]
        if arrived:
            joining = step(model, make_batch(model, arrived), shown, start)
            batches += [] if joining is None else [joining]
        batch = CausalLMBatch.concatenate(batches) if len(batches) > 1 else batches[0] if batches else None
        if batch is not None:
            batch = step(model, batch, shown, start)
    return measured(load, shown, time.perf_counter() - start)


def step(model: CausalLM, batch: CausalLMBatch, shown: Shown, start: float) -> CausalLMBatch | None:
    """Run one step, then remove finished requests."""
    generations, after = model.generate_token(batch)
    now = time.perf_counter() - start
    for generation in generations:
        shown[generation.request_id].append((now, generation.next_tokens.token_ids[0]))
    finished = {generation.request_id for generation in generations if generation.generated_text is not None}
    if after is None or not finished:
        return after
    return after.filter([request.id for request in after.requests if request.id not in finished])


def make_batch(model: CausalLM, arrived: Sequence[Wanted]) -> CausalLMBatch:
    requests = [
        generate_pb2.Request(
            id=wanted.request_id,
            tokenized_inputs=generate_pb2.TokenizedInputs(ids=wanted.prompt),
            parameters=generate_pb2.NextTokenChooserParameters(temperature=1.0),
            stopping_parameters=generate_pb2.StoppingCriteriaParameters(
                max_new_tokens=wanted.num_tokens, ignore_eos_token=True
            ),
        )
        for wanted in arrived
    ]
    message = generate_pb2.Batch(id=arrived[0].request_id, requests=requests)
    return CausalLMBatch.from_pb(
        message, model.tokenizer, model.tokenizers, None, model.config, model.dtype, model.device
    )


def serve_static(model: CausalLM, load: Sequence[Wanted]) -> Served:
    waiting = list(load)
    shown: Shown = {}
    start = time.perf_counter()
    while waiting:
        arrived = take_arrived(waiting, MAX_ROWS, start, wait=True)
        batch = make_batch(model, arrived)
        watch = Watch(start)
        output = model.model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask[:, : batch.max_input_length],
            max_new_tokens=max(wanted.num_tokens for wanted in arrived),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=watch,
        )
        for wanted, row in zip(arrived, output[:, batch.max_input_length :].tolist(), strict=True):
            shown[wanted.request_id] = list(zip(watch.times, row, strict=True))[: wanted.num_tokens]
    return measured(load, shown, time.perf_counter() - start)


class Watch:
    """A streamer of transformers that only records times; it is called with the prompt first."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.calls: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.calls.append(time.perf_counter() - self.start)

    def end(self) -> None: ...

    @property
    def times(self) -> list[float]:
        return self.calls[1:]


def take_arrived(waiting: list[Wanted], most: int, start: float, wait: bool) -> list[Wanted]:
    """Take requests that have arrived off the queue; wait for the next if there is nothing else to do."""
    if wait and waiting:
        time.sleep(max(0.0, waiting[0].arrival - (time.perf_counter() - start)))
    now = time.perf_counter() - start
    count = sum(wanted.arrival <= now for wanted in waiting[:most])
    taken = waiting[:count]
    del waiting[:count]
    return taken


def measured(load: Sequence[Wanted], shown: Shown, seconds: float) -> Served:
    for wanted in load:
        assert len(shown[wanted.request_id]) == wanted.num_tokens, f"request {wanted.request_id} is not complete"
    return Served(
        seconds,
        [shown[wanted.request_id][0][0] - wanted.arrival for wanted in load],
        [shown[wanted.request_id][-1][0] - wanted.arrival for wanted in load],
        {request_id: [token for _, token in tokens] for request_id, tokens in shown.items()},
    )


if __name__ == "__main__":
    main()
