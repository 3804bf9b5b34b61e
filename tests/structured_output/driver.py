"""A driver that replaces the engine: it advances completions with allowed tokens."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from lorax_server.build import build_vocabulary
from lorax_server.errors import LoraxError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output.manager import StructuredOutput
from lorax_server.structured_output.trials import GrammarTrials
from lorax_server.structured_output.vocabulary import TokenMask, Vocabulary
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer
from lorax_server.types import Request, SamplingParams, StopParams, Structure, TokenTable

EOS_ID = 1
STOP = StopParams(max_new_tokens=1000, eos_token_ids=frozenset([EOS_ID]))
TIMEOUT_S = 120.0


def list_allowed(words: TokenMask) -> list[int]:
    return [int(each) for each in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


class Driver:
    """Starts and advances requests like the engine."""

    def __init__(
        self, model: Path, sandbox: Sandbox | None = None, build: Callable[[], Vocabulary] | None = None
    ) -> None:
        self.tokenizer: TextTokenizer = load_tokenizer(model)
        self.structured_output = StructuredOutput(build or partial(build_vocabulary, model))
        self.news = threading.Event()
        self.structured_output.on_event = self.news.set
        self._trials = None if sandbox is None else GrammarTrials(sandbox)
        self._next_id = 0
        self._results: dict[int, LoraxError | None] = {}

    def close(self) -> None:
        self.structured_output.close()

    def check(self, structure: Structure, tenant: str = "") -> "Future[Structure]":
        """Run a trial compile in the sandbox, like the API process."""
        assert self._trials is not None
        return self._trials.submit(structure, self.tokenizer.token_table(), tenant)

    def begin(
        self,
        structure: Structure,
        *,
        stop: StopParams = STOP,
        fast_forward: bool = False,
        vocabulary: TokenTable | None = None,
        tenant: str = "",
    ) -> int:
        self._next_id += 1
        request = Request(
            self._next_id,
            [0],
            SamplingParams(),
            stop,
            structure=structure,
            vocabulary=vocabulary,
            tenant=tenant,
        )
        self.structured_output.start(request, 10**6 if fast_forward else 0)
        return self._next_id

    def settle(self, request_id: int) -> LoraxError | None:
        """Wait until a request has its first mask. Return its error."""
        while request_id not in self._results:
            assert self.news.wait(TIMEOUT_S), "the request is neither rejected nor started"
            self.news.clear()
            self._results |= dict(self.structured_output.pop_results())
        return self._results[request_id]

    def start(self, structure: Structure, **options: object) -> int:
        request_id = self.begin(structure, **options)  # type: ignore[arg-type]
        assert self.settle(request_id) is None
        return request_id

    def find_error(self, request_id: int) -> LoraxError | None:
        """Return the error for a started request."""
        errors = dict(self.structured_output.pop_results())
        return errors.get(request_id)

    def allowed(self, request_id: int) -> list[int]:
        """Wait for the next mask and list its tokens. Return an empty list if the completion has failed."""
        result = self.structured_output.collect_masks([request_id], TIMEOUT_S).get(request_id)
        return [] if result is None else list_allowed(result.mask)

    def consume(self, request_id: int, *token_ids: int) -> None:
        for token_id in token_ids:
            assert token_id in self.allowed(request_id), self.tokenizer.decode([token_id])
            self.structured_output.advance([(request_id, token_id)])

    def write(self, request_id: int, text: str) -> None:
        """Consume a text as single-character tokens."""
        for character in text:
            (token_id,) = self.tokenizer.encode(character, add_special_tokens=False)
            self.consume(request_id, token_id)

    def advance(self, request_id: int, random: np.random.Generator) -> bool:
        """Consume a random allowed token. Return False if the completion has finished or failed."""
        allowed = self.allowed(request_id)
        token_id = int(random.choice(allowed)) if allowed else EOS_ID
        if token_id == EOS_ID:
            return False
        self.structured_output.advance([(request_id, token_id)])
        return True

    def finish(self, *request_ids: int) -> None:
        for request_id in request_ids:
            self.structured_output.finish(request_id)
