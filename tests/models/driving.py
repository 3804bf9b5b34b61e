"""Test requests and a minimal server loop: step, collect output, filter."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.models.contract.types import GeneratedText, Generation, NextTokens
from lorax_server.pb import generate_pb2 as pb

NO_TOKEN = 1_000_000  # larger than every test vocabulary
MAX_TIE_GAP = 1e-4  # closer logits may be ordered by rounding


def request(
    request_id: int = 0,
    prompt: Sequence[int] | str = (5, 9, 20, 33, 41),
    max_new_tokens: int = 8,
    *,
    stop: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    **parameters: Any,
) -> pb.Request:
    """Create a request with sampling `parameters`, `stop` parameters and other `fields`."""
    text = prompt if isinstance(prompt, str) else ""
    ids = [] if isinstance(prompt, str) else prompt
    return pb.Request(
        id=request_id,
        inputs=text,
        tokenized_inputs=pb.TokenizedInputs(ids=ids),
        parameters=pb.NextTokenChooserParameters(**{"temperature": 1.0, **parameters}),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, **(stop or {})),
        **(fields or {}),
    )


def batch_of(lm: CausalLM, *requests: pb.Request, batch_id: int = 0) -> CausalLMBatch:
    message = pb.Batch(id=batch_id, requests=requests)
    return CausalLMBatch.from_pb(message, lm.tokenizer, lm.tokenizers, None, lm.config, lm.dtype, lm.device)


@dataclass
class RequestOutput:
    """All output of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # without special tokens
    prompt: NextTokens | None = None
    end: GeneratedText | None = None
    generations: list[Generation] = field(default_factory=list)

    def add(self, generation: Generation) -> None:
        assert self.end is None, f"request {generation.request_id} goes on after its end"
        shown = generation.next_tokens
        self.token_ids += shown.token_ids
        self.logprobs += shown.logprobs
        self.texts += [text for text, special in zip(shown.texts, shown.is_special, strict=True) if not special]
        self.prompt = generation.prefill_tokens or self.prompt
        self.end = generation.generated_text
        self.generations.append(generation)


class Driver:
    """Steps batches and collects the output of each request."""

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self.outputs: dict[int, RequestOutput] = {}

    def step(self, batch: CausalLMBatch, *, keep_finished: bool = False) -> CausalLMBatch | None:
        """Run one step, then filter out finished requests."""
        generations, following = self.lm.generate_token(batch)
        for generation in generations:
            self.outputs.setdefault(generation.request_id, RequestOutput()).add(generation)
        if following is None or keep_finished:
            return following
        return following.filter([each.id for each in following.requests if self.outputs[each.id].end is None])

    def start(self, *requests: pb.Request, steps: int = 1) -> CausalLMBatch:
        batch = batch_of(self.lm, *requests)
        return self.steps(batch, steps)

    def steps(self, batch: CausalLMBatch, count: int) -> CausalLMBatch:
        for _ in range(count):
            following = self.step(batch)
            assert following is not None
            batch = following
        return batch

    def finish(self, batch: CausalLMBatch | None) -> None:
        while batch is not None:
            batch = self.step(batch)


def run(lm: CausalLM, *requests: pb.Request) -> list[RequestOutput]:
    """Run all requests in one batch until they finish."""
    driver = Driver(lm)
    driver.finish(batch_of(lm, *requests))
    return [driver.outputs[each.id] for each in requests]


@torch.no_grad()
def generate(oracle: Any, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """Return transformers' greedy tokens, up to the first near tie, where rounding may change the token.

    Generation stops only at the given `eos` tokens.
    """
    ids = torch.tensor([list(prompt)], device=oracle.device)
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(eos) or [NO_TOKEN],
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = []
    for token_id, logits in zip(out.sequences[0, len(prompt) :].tolist(), out.logits, strict=True):
        first, second = logits[0].topk(2).values
        if first - second < MAX_TIE_GAP:
            break
        tokens.append(token_id)
    return tokens
