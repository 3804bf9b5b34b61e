"""The server's engine in a script: prompts in, completions out.

llm = LLM("path/to/model", adapters={"french": "path/to/adapter"})
for completion in llm.generate(["Once upon a time", "Hello"], adapter=["french", None]):
    print(completion.text)
"""

import itertools
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from tqdm import tqdm

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import AdapterError, AdapterNotFoundError, EngineError, InputError, LoraxError
from lorax_server.generation.generation import Completion, Generation, TokenEvent
from lorax_server.phases import Phases
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output.trials import TRIAL, GrammarTrials
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.generation_defaults import load_generation_defaults
from lorax_server.text.prompt import Prompt, encode_prompt, list_prompts, spread
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.threads import failed
from lorax_server.types import AdapterRef, EngineStatus, Request, Resolved, SamplingParams, StopParams, Structure

_T = TypeVar("_T")


class LLM:
    """A model and its adapters. Several threads may use one; their requests share the steps."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        **settings: Any,
    ) -> None:
        """`adapters` are folders by name, or one folder whose subfolders are adapters. `settings` are those of
        `EngineConfig`."""
        path = Path(model)
        named = adapters if isinstance(adapters, Mapping) else {}
        self._folders = {adapter_id: Path(folder).resolve() for adapter_id, folder in named.items()}
        roots = [Path(adapters).resolve()] if isinstance(adapters, str | os.PathLike) else []
        # The engine is asked for these folders only. Their files may be links to anywhere, as in the hub's cache.
        roots += [Path(folder.anchor) for folder in self._folders.values()]
        settings.setdefault("sources", SourceConfig(tuple(dict.fromkeys(roots))))
        # A script gives all of its prompts at once, and waits until they are done.
        settings.setdefault("max_waiting", None)
        settings.setdefault("adapter_timeout_s", math.inf)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        phases = Phases()
        with phases.measure("tokenizer"):
            self._tokenizer = load_tokenizer(path)
        self._eos_token_ids = load_generation_defaults(path).eos_token_ids
        self._sandbox = Sandbox(1)
        self._trials = GrammarTrials(self._sandbox, TRIAL._replace(max_pending=None))
        self._tokenizers = AdapterTokenizers(self._tokenizer, path, self._sandbox)
        self._lock = threading.Lock()  # guards all below
        config = EngineConfig(ModelConfig(path, dtype=dtype, device=device, quantize=quantize), **settings)
        self._built: Engine | None = build_engine(config, phases=phases)
        self.start_seconds: Mapping[str, float] = phases.seconds  # that the start took, by phase
        self._end = EngineError("this LLM is closed")  # the reason why there is no engine, if there is none
        self._runs: dict[int, Generation] = {}
        self._left: deque[Generation] = deque()  # to be aborted
        self._ids = itertools.count()
        self._num_ended = 0
        self._loaded: dict[str, set[str]] = {}  # identities by the adapter_id that was loaded

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopParams | Sequence[StopParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        structure: Structure | Sequence[Structure | None] | None = None,
        prompt_logprobs: bool = False,
        progress: bool | None = None,
        on_error: str = "raise",
    ) -> list[Completion]:
        """Answer prompts, given as text or token ids, all together.

        `params`, `stop`, `adapter` and `structure` are for all of them, or lists with one for each; the adapter None is
        the base model. `structured_output.grammars` makes structures. `progress` shows a bar; None: on a terminal.
        `on_error="return"` leaves an error in its completion instead of raising the first.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error is 'raise' or 'return', not {on_error!r}")
        listed = list_prompts(prompts)
        adapter_ids = spread(adapter, str, "adapters", len(listed))
        samplings = spread(params, SamplingParams, "params", len(listed))
        stops = spread(stop, StopParams, "stops", len(listed))
        structures = spread(structure, Structure, "structures", len(listed))
        if progress is None:
            progress = sys.stderr.isatty() and len(listed) > 1
        runs: list[Generation] = []
        bar = tqdm(total=len(listed), unit="prompt", disable=not progress, dynamic_ncols=True)
        try:
            resolved = self._resolve_all(adapter_ids, on_error)
            for arguments in zip(listed, resolved, samplings, stops, structures, strict=True):
                runs.append(self._make_run(*arguments, prompt_logprobs))
            for run in runs:
                self._start(run, on_error)
            self._finish(runs, bar, on_error)
        finally:
            bar.close()
            self._stop(runs)
        return [run.completion for run in runs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        stop: StopParams | None = None,
        *,
        adapter: str | None = None,
        structure: Structure | None = None,
    ) -> Iterator[TokenEvent]:
        """Answer one prompt, token by token. Closing the iterator ends the request."""
        run = self._make_run(prompt, self._resolve_all([adapter], "raise")[0], params, stop, structure, False)
        try:
            self._start(run, "raise")
            while True:
                with self._lock:  # another thread may be adding to it
                    events, is_done = run.take_events(), run.is_done
                yield from events
                if run.completion.error is not None:
                    raise run.completion.error
                if is_done:
                    return
                self._step()
        finally:
            self._stop([run])

    def load_adapter(self, adapter_id: str, *, pin: bool = False) -> None:
        """Bring an adapter to the device before it is needed; one that is pinned stays there."""
        identity = self._await(self._resolve(adapter_id)).identity
        with self._held():
            loading = self._engine.load(identity, pin or None)
            self._loaded.setdefault(adapter_id, set()).add(identity)
        self._await(loading)

    def unload_adapter(self, adapter_id: str) -> None:
        """Unload an adapter as soon as no request needs it, with the versions that its files had before."""
        identities = self._loaded.pop(adapter_id, set())
        try:
            identities.add(self._await(self._resolve(adapter_id)).identity)
        except AdapterError:
            if not identities:
                raise
        with self._held():
            for identity in identities:
                self._engine.unload(identity)

    @property
    def status(self) -> EngineStatus:
        with self._held():
            return self._engine.status()

    def close(self) -> None:
        """Free the memory. Requests that are under way end with an error."""
        self._sandbox.close()
        with self._held():
            engine, self._built = self._built, None
            self._runs.clear()
            if engine is not None:
                engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _make_run(
        self,
        prompt: Prompt,
        resolved: Resolved | LoraxError,
        params: SamplingParams | None,
        stop: StopParams | None,
        structure: Structure | None,
        prompt_logprobs: bool,
    ) -> Generation:
        tokenizer, ids, identity, failure = self._tokenizer, [], "", None
        try:
            if isinstance(resolved, LoraxError):
                failure = resolved
            else:
                tokenizer, identity = self._tokenizers.find(resolved), resolved.identity
            ids = encode_prompt(tokenizer, prompt)
            if structure is not None:
                structure = self._trials.submit(structure, tokenizer.token_table()).result()
        except LoraxError as error:
            failure = failure or error
        stop = stop or StopParams()
        if not stop.eos_token_ids:
            stop = replace(stop, eos_token_ids=self._eos_token_ids | tokenizer.eos_token_ids)
        request = Request(next(self._ids), ids, params or SamplingParams(), stop, identity)
        request = replace(request, prompt_logprobs=prompt_logprobs, structure=structure)
        if failure is None and structure is not None and not tokenizer.shares_vocabulary(self._tokenizer):
            request = replace(request, vocabulary=tokenizer.token_table())
        run = Generation(request, tokenizer.detokenizer)
        run.completion.error = failure
        return run

    def _start(self, run: Generation, on_error: str) -> None:
        try:
            if run.completion.error is not None:
                raise run.completion.error
            with self._held():
                self._engine.add(run.request)
                self._runs[run.request.request_id] = run
        except LoraxError as error:
            if on_error == "raise" or isinstance(error, EngineError):
                raise
            run.completion.error = error

    def _finish(self, runs: Sequence[Generation], bar: Any, on_error: str) -> None:
        unfinished = list(runs)
        while unfinished:
            num_ended = self._num_ended
            running = [run for run in unfinished if not run.is_done]
            failure = next((run.completion.error for run in unfinished if run.completion.error is not None), None)
            if failure is not None and on_error == "raise":
                raise failure
            bar.update(len(unfinished) - len(running))
            unfinished = running
            while unfinished and num_ended == self._num_ended:  # a look at all of them after each step takes long
                self._step()

    def _stop(self, runs: Sequence[Generation]) -> None:
        """Abort requests without waiting: Python may close a forgotten iterator anywhere, even within a step."""
        self._left.extend(run for run in runs if run.request.request_id in self._runs)
        if self._left and self._lock.acquire(blocking=False):
            try:
                self._abort_left()
            finally:
                self._lock.release()

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft().request.request_id
            if self._runs.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _step(self) -> None:
        """Run one step of the engine, for all threads that wait."""
        self._engine.wait()
        with self._held():
            engine = self._engine
            try:
                outputs = engine.step()
            except BaseException as error:  # the state of the engine is unknown now
                self._built = None
                self._end = EngineError(f"the engine of this LLM failed: {str(error) or type(error).__name__}")
                self._runs.clear()
                engine.close()
                raise
            for output in outputs:
                if (run := self._runs.get(output.request_id)) is None:
                    continue
                try:
                    run.append_output(output)
                except Exception as error:  # otherwise other requests would lose their outputs of this step
                    run.completion.error = LoraxError(f"broken output: {str(error) or type(error).__name__}")
                if run.is_done:
                    del self._runs[output.request_id]
                    self._num_ended += 1
                    if output.finish_reason is None and output.failure is None:
                        engine.abort(output.request_id)  # a stop string, which the engine does not see

    @property
    def _engine(self) -> Engine:
        if self._built is None:
            raise EngineError(str(self._end))
        return self._built

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the engine for one thread, which Ctrl-C does not interrupt."""
        with _uninterrupted(), self._lock:
            self._abort_left()
            yield

    # --- Adapters and text --------------------------------------------------------------------------------------------

    def _resolve_all(self, adapter_ids: Sequence[str | None], on_error: str) -> list[Resolved | LoraxError]:
        """Resolve each adapter once, all at the same time."""
        futures = {
            adapter_id: self._resolve(adapter_id) for adapter_id in dict.fromkeys(adapter_ids) if adapter_id is not None
        }
        resolved: dict[str | None, Resolved | LoraxError] = {None: Resolved("")}
        for adapter_id, future in futures.items():
            try:
                resolved[adapter_id] = self._await(future)
            except LoraxError as error:
                if on_error == "raise":
                    raise
                resolved[adapter_id] = error
        return [resolved[adapter_id] for adapter_id in adapter_ids]

    def _resolve(self, adapter_id: str) -> "Future[Resolved]":
        """Ask the engine which adapter an adapter_id means now. All failures are in the Future."""
        if self._folders and adapter_id not in self._folders:
            names = ", ".join(sorted(self._folders))
            return failed(AdapterNotFoundError(f"adapter {adapter_id!r}: there are {names}"))
        with self._held():
            return self._engine.resolve([AdapterRef("local", str(self._folders.get(adapter_id, adapter_id)))])

    def _await(self, future: "Future[_T]") -> _T:
        while not future.done():
            self._step()
        return future.result()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C: an engine that is interrupted in a step does not know what it has submitted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *heard_now: heard.append(heard_now))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if heard:
            handler(*heard[0])
