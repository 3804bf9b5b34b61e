"""The engine in a script: prompts in, completions out. What the server runs, without a server.

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
from operator import index
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from tqdm import tqdm

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import AdapterError, AdapterNotFoundError, EngineError, InputError, LoraxError
from lorax_server.generation.generation import Completion, Generation, TokenEvent
from lorax_server.models.pretrained import eos_token_ids, load_config, load_generation_eos
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer
from lorax_server.types import (
    AdapterRef,
    EngineStatus,
    Request,
    Resolved,
    SamplingParams,
    StopParams,
)

Prompt = str | Sequence[int]
MAX_ID = 2**31 - 1
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
        **settings: Any,
    ) -> None:
        """`adapters` are folders by name, or one folder whose subfolders are adapters. `settings` are those of
        `EngineConfig`."""
        path = Path(model)
        self._folders = {name: Path(folder).resolve() for name, folder in _named(adapters).items()}
        roots = [Path(adapters).resolve()] if isinstance(adapters, str | os.PathLike) else []
        # Only these folders are asked for, and their files may be links to anywhere, as in the cache of the hub.
        roots += [Path(folder.anchor) for folder in self._folders.values()]
        settings.setdefault("sources", SourceConfig(tuple(dict.fromkeys(roots))))
        # A script gives all of its prompts at once, and waits until they are done.
        settings.setdefault("max_waiting", None)
        settings.setdefault("adapter_timeout_s", math.inf)
        model_config = ModelConfig(path, dtype=dtype, device=device or _find_device())
        self._tokenizer = load_tokenizer(path)
        self._eos_token_ids = _load_eos(path)
        self._tokenizers = AdapterTokenizers(self._tokenizer, path)
        self._lock = threading.Lock()  # of all below
        self._built: Engine | None = build_engine(EngineConfig(model_config, **settings))
        self._end = EngineError("this LLM is closed")  # why there is no engine, if there is none
        self._runs: dict[int, Generation] = {}
        self._left: deque[Generation] = deque()  # that nobody wants any more
        self._ids = itertools.count()
        self._num_ended = 0
        self._loaded: dict[str, set[str]] = {}  # who a name meant when it was asked to be loaded

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopParams | Sequence[StopParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        prompt_logprobs: bool = False,
        progress: bool | None = None,
        on_error: str = "raise",
    ) -> list[Completion]:
        """Answer prompts, given as text or token ids, all together.

        `params`, `stop` and `adapter` are for all of them, or lists with one for each; the adapter None is the base
        model. `progress` shows a bar; None: on a terminal. `on_error="return"` leaves an error in its completion
        instead of raising the first.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error is 'raise' or 'return', not {on_error!r}")
        listed: list[Prompt] = list(prompts) if _is_list(prompts) else [prompts]  # type: ignore[list-item, arg-type]
        names = _spread(adapter, str, "adapters", len(listed))
        choices = _spread(params, SamplingParams, "params", len(listed))
        stops = _spread(stop, StopParams, "stops", len(listed))
        runs: list[Generation] = []
        bar = tqdm(total=len(listed), unit="prompt", disable=not _shows(progress, len(listed)), dynamic_ncols=True)
        try:
            found = self._resolve_all(names, on_error)
            for prompt, who, how, until in zip(listed, found, choices, stops, strict=True):
                runs.append(self._make_run(prompt, who, how, until, prompt_logprobs))
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
    ) -> Iterator[TokenEvent]:
        """Answer one prompt, token by token. Closing the iterator ends the request."""
        run = self._make_run(prompt, self._resolve_all([adapter], "raise")[0], params, stop, False)
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

    def load_adapter(self, name: str, *, pin: bool = False) -> None:
        """Bring an adapter to the device before it is needed; one that is pinned stays there."""
        identity = self._await(self._ask(name)).identity
        with self._held():
            loading = self._engine.load(identity, pin or None)
            self._loaded.setdefault(name, set()).add(identity)
        self._await(loading)

    def unload_adapter(self, name: str) -> None:
        """Let an adapter go as soon as no request needs it, also what it was before its files were replaced."""
        identities = self._loaded.pop(name, set())
        try:
            identities.add(self._await(self._ask(name)).identity)
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
        """Give back the memory. Requests that are under way end with an error."""
        self._tokenizers.close()
        with self._held():
            engine, self._built = self._built, None
            self._runs.clear()
            if engine is not None:
                engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _make_run(
        self,
        prompt: Prompt,
        who: Resolved | LoraxError,
        params: SamplingParams | None,
        stop: StopParams | None,
        prompt_logprobs: bool,
    ) -> Generation:
        tokenizer, problem = self._tokenizer, who if isinstance(who, LoraxError) else None
        ids: list[int] = []
        try:
            tokenizer = tokenizer if isinstance(who, LoraxError) else self._tokenizers.find(who)
            ids = _to_ids(tokenizer, prompt)
        except LoraxError as error:
            problem = problem or error
        stop = stop or StopParams()
        if not stop.eos_token_ids:
            stop = replace(stop, eos_token_ids=self._eos_token_ids | tokenizer.eos_token_ids)
        identity = "" if isinstance(who, LoraxError) else who.identity
        request = Request(
            next(self._ids),
            ids,
            params or SamplingParams(),
            stop,
            identity,
            prompt_logprobs=prompt_logprobs,
        )
        run = Generation(request, tokenizer.detokenizer)
        run.completion.error = problem
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
        left = list(runs)
        while left:
            num_ended = self._num_ended
            still = [run for run in left if not run.is_done]
            failed = next((run.completion.error for run in left if run.completion.error is not None), None)
            if failed is not None and on_error == "raise":
                raise failed
            bar.update(len(left) - len(still))
            left = still
            while left and num_ended == self._num_ended:  # looking through all after each step takes long
                self._step()

    def _stop(self, runs: Sequence[Generation]) -> None:
        """Waits for nobody: an iterator that is forgotten is closed wherever Python happens to be, be it in a step."""
        self._left.extend(run for run in runs if run.request.request_id in self._runs)
        if self._left and self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        while self._left:
            request_id = self._left.popleft().request.request_id
            if self._runs.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _step(self) -> None:
        """One turn of the engine, for whoever waits for it."""
        self._engine.wait()
        with self._held():
            engine = self._engine
            engine.wake.clear()
            try:
                outputs = engine.step()
            except BaseException as error:  # nobody knows what is under way now
                self._built = None
                self._end = EngineError(f"the engine of this LLM failed: {str(error) or type(error).__name__}")
                self._runs.clear()
                engine.close()
                raise
            for output in outputs:
                run = self._runs.get(output.request_id)
                if run is None:
                    continue
                run.append_output(output)
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
        """The engine, to one thread, which Ctrl-C does not stop before it is done."""
        with _uninterrupted(), self._lock:
            self._let_go()
            yield

    # --- Adapters and text --------------------------------------------------------------------------------------------

    def _resolve_all(self, names: Sequence[str | None], on_error: str) -> list[Resolved | LoraxError]:
        """Each name once, all at the same time."""
        asked = {name: self._ask(name) for name in dict.fromkeys(names) if name is not None}
        found: dict[str | None, Resolved | LoraxError] = {None: Resolved("")}
        for name, answer in asked.items():
            try:
                found[name] = self._await(answer)
            except LoraxError as error:
                if on_error == "raise":
                    raise
                found[name] = error
        return [found[name] for name in names]

    def _ask(self, name: str) -> "Future[Resolved]":
        """Who a name means now. Whatever is wrong with it is in the Future."""
        if self._folders and name not in self._folders:
            unknown: Future[Resolved] = Future()
            known = ", ".join(sorted(self._folders))
            unknown.set_exception(AdapterNotFoundError(f"adapter {name!r}: there are {known}"))
            return unknown
        with self._held():
            return self._engine.resolve([AdapterRef("local", str(self._folders.get(name, name)))])

    def _await(self, answer: "Future[_T]") -> _T:
        while not answer.done():
            self._step()
        return answer.result()


def _named(adapters: Any) -> Mapping[str, str | os.PathLike[str]]:
    return adapters if isinstance(adapters, Mapping) else {}


def _spread(given: Any, kind: type[_T], what: str, count: int) -> list[_T | None]:
    """One for all prompts, or a list with one for each."""
    listed = [given] * count if given is None or isinstance(given, kind) else list(given)
    if len(listed) != count:
        raise InputError(f"{count} prompts, but {len(listed)} {what}")
    return listed


def _is_list(prompts: Any) -> bool:
    """Of prompts; a list of token ids is one prompt."""
    return not isinstance(prompts, str) and not (len(prompts) > 0 and _is_id(prompts[0]))


def _is_id(value: Any) -> bool:
    """Also one of numpy's, or a tensor of nothing but it."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _to_ids(tokenizer: TextTokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        ids = [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InputError(f"a prompt is a text or a list of token ids: {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_ID:  # which no tokenizer can be asked for
        raise InputError("a prompt has tokens beyond the vocabulary")
    return ids


def _shows(progress: bool | None, count: int) -> bool:
    return sys.stderr.isatty() and count > 1 if progress is None else progress


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hear Ctrl-C afterwards: an engine that is left in the middle of a step does not know what it has submitted."""
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


def _find_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_eos(model: Path) -> frozenset[int]:
    """The tokens that end an answer, as the model's configs say; its tokenizer may name another."""
    config = load_config(str(model), None, trust_remote_code=False)
    return load_generation_eos(str(model), None) | eos_token_ids(config)
