"""The engine in a script: prompts in, completions out. What the server runs, without a server.

llm = LLM("path/to/model", adapters={"french": "path/to/adapter"})
for completion in llm.generate(["Once upon a time", "Hello"], adapter=["french", None]):
    print(completion.text)
"""

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from tqdm import tqdm

from lorax_server.answer import Answer
from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import AdapterNotFoundError, InputError, LoraxError
from lorax_server.models.pretrained import eos_token_ids, load_config, load_generation_eos, load_tokenizer
from lorax_server.text import Detokenizer, make_detokenizer
from lorax_server.types import (
    AdapterRef,
    Alternatives,
    EngineStatus,
    FinishReason,
    Merge,
    Output,
    Request,
    Resolved,
    SamplingParams,
    StopParams,
)

Prompt = str | Sequence[int]
IDLE_S = 0.05  # how often it is looked for what depends on time alone
VOCABULARY_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json"}  # a tokenizer has one of them
_T = TypeVar("_T")


class Chunk(NamedTuple):
    """What one token added."""

    text: str
    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    alternatives: Alternatives | None = None


@dataclass
class Completion:
    """A prompt's answer."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)  # of each token, if they were asked for
    prompt_logprobs: list[float] | None = None  # from the second token on, if they were asked for
    finish_reason: FinishReason | None = None
    error: LoraxError | None = None


class _Tokenizer(NamedTuple):
    encode: Any
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]


class _Run:
    """A request under way."""

    def __init__(self, request: Request, answer: Answer) -> None:
        self.request = request
        self.answer = answer
        self.completion = Completion(list(request.prompt_ids))
        self.chunks: list[Chunk] = []

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason is not None or self.completion.error is not None

    def take(self, output: Output) -> None:
        completion = self.completion
        if output.failure is not None:
            completion.error = output.failure.to_error()
            return
        text = self.answer.take(output.token_id)
        completion.token_ids.append(output.token_id)
        completion.logprobs.append(output.logprob)
        completion.prompt_logprobs = completion.prompt_logprobs or output.prompt_logprobs
        if output.alternatives is not None:
            completion.alternatives.append(output.alternatives)
        completion.text = self.answer.text
        completion.finish_reason = self.answer.finish_reason or output.finish_reason
        self.chunks.append(Chunk(text, output.token_id, output.logprob, completion.finish_reason, output.alternatives))


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
        roots += [folder.parent for folder in self._folders.values()]
        settings.setdefault("sources", SourceConfig(tuple(dict.fromkeys(roots))))
        model_config = ModelConfig(path, dtype=dtype, device=device or _find_device())
        self._tokenizer = _load_tokenizer(path, path)
        self._path = path
        self._engine: Engine = build_engine(EngineConfig(model_config, **settings))
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._ids = itertools.count()
        self._tokenizers: dict[tuple[object, ...], _Tokenizer] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        stop: StopParams | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        prompt_logprobs: bool = False,
        progress: bool | None = None,
        on_error: str = "raise",
    ) -> list[Completion]:
        """Answer prompts, given as text or token ids, all together.

        `adapter` is one name for all, or a list with one, or None for the base model, for each. `progress` shows a
        bar; None: on a terminal. `on_error="return"` leaves an error in its completion instead of raising the first.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error is 'raise' or 'return', not {on_error!r}")
        listed: list[Prompt] = list(prompts) if _is_list(prompts) else [prompts]  # type: ignore[list-item, arg-type]
        names = [adapter] * len(listed) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(listed):
            raise InputError(f"{len(listed)} prompts, but {len(names)} adapters")
        runs: list[_Run] = []
        bar = tqdm(total=len(listed), unit="prompt", disable=not _shows(progress, len(listed)), dynamic_ncols=True)
        try:
            resolved = self._resolve_all(names, on_error)
            for prompt, who in zip(listed, resolved, strict=True):
                runs.append(self._start(prompt, who, params, stop, prompt_logprobs, on_error))
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
    ) -> Iterator[Chunk]:
        """Answer one prompt, token by token. Closing the iterator ends the request."""
        run = self._start(prompt, self._resolve_all([adapter], "raise")[0], params, stop, False, "raise")
        try:
            while True:
                chunks, run.chunks = run.chunks, []
                yield from chunks
                if run.completion.error is not None:
                    raise run.completion.error
                if run.is_done:
                    return
                self._step()
        finally:
            self._stop([run])

    def load_adapter(self, name: str, *, pin: bool = False) -> None:
        """Bring an adapter to the device before it is needed; one that is pinned stays there."""
        identity = self._await(self._ask([AdapterRef("local", self._folder(name))])).identity
        with self._lock:
            loading = self._engine.load(identity, pin)
        self._await(loading)

    def unload_adapter(self, name: str) -> None:
        """Let an adapter go as soon as no request needs it."""
        identity = self._await(self._ask([AdapterRef("local", self._folder(name))])).identity
        with self._lock:
            self._engine.unload(identity)

    @property
    def status(self) -> EngineStatus:
        with self._lock:
            return self._engine.status()

    def close(self) -> None:
        """Give back the memory. Requests that are under way get no more tokens."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _start(
        self,
        prompt: Prompt,
        who: Resolved | LoraxError,
        params: SamplingParams | None,
        stop: StopParams | None,
        prompt_logprobs: bool,
        on_error: str,
    ) -> _Run:
        identity = "" if isinstance(who, LoraxError) else who.identity
        tokenizer = self._tokenizer if isinstance(who, LoraxError) else self._tokenizer_of(who)
        stop = stop or StopParams()
        if not stop.eos_token_ids:
            stop = replace(stop, eos_token_ids=tokenizer.eos_token_ids)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = params or SamplingParams()
        with self._lock:
            request_id = next(self._ids)
            request = Request(
                request_id, ids, sampling, stop, identity, tenant=identity, prompt_logprobs=prompt_logprobs
            )
            run = _Run(request, Answer(tokenizer.detokenizer, ids, stop))
            try:
                if isinstance(who, LoraxError):
                    raise who
                self._engine.add(request)
                self._runs[request_id] = run
            except LoraxError as error:
                if on_error == "raise":
                    raise
                run.completion.error = error
        return run

    def _finish(self, runs: Sequence[_Run], bar: Any, on_error: str) -> None:
        left = list(runs)
        while left:
            still = [run for run in left if not run.is_done]
            failed = next((run.completion.error for run in left if run.completion.error is not None), None)
            if failed is not None and on_error == "raise":
                raise failed
            bar.update(len(left) - len(still))
            left = still
            if left:
                self._step()

    def _stop(self, runs: Sequence[_Run]) -> None:
        with self._lock:
            for run in runs:
                if self._runs.pop(run.request.request_id, None) is not None:
                    self._engine.abort(run.request.request_id)

    def _step(self) -> None:
        """One turn of the engine, for whoever waits for it."""
        if not self._engine.is_busy:
            self._engine.wake.wait(IDLE_S)
        with self._lock:
            self._engine.wake.clear()
            for output in self._engine.step():
                run = self._runs.get(output.request_id)
                if run is None:
                    continue
                run.take(output)
                if run.is_done:
                    del self._runs[output.request_id]
                    if output.finish_reason is None and output.failure is None:
                        self._engine.abort(output.request_id)  # a stop string, which the engine does not see

    # --- Adapters and text --------------------------------------------------------------------------------------------

    def _resolve_all(self, names: Sequence[str | None], on_error: str) -> list[Resolved | LoraxError]:
        """Each name once, all at the same time."""
        asked = {name: self._ask([AdapterRef("local", self._folder(name))]) for name in set(names) if name is not None}
        found: dict[str | None, Resolved | LoraxError] = {None: Resolved("")}
        for name, answer in asked.items():
            try:
                found[name] = self._await(answer)
            except LoraxError as error:
                if on_error == "raise":
                    raise
                found[name] = error
        return [found[name] for name in names]

    def _ask(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[Resolved]":
        with self._lock:
            return self._engine.resolve(refs, merge)

    def _await(self, answer: "Future[_T]") -> _T:
        while not answer.done():
            self._step()
        return answer.result()

    def _folder(self, name: str) -> str:
        if self._folders and name not in self._folders:
            raise AdapterNotFoundError(f"adapter {name!r}: there are {', '.join(sorted(self._folders))}")
        return str(self._folders.get(name, name))

    def _tokenizer_of(self, who: Resolved) -> _Tokenizer:
        """The adapter's own, where it brings one."""
        if who.folder is None or not VOCABULARY_FILES & set(who.tokenizer_files):
            return self._tokenizer
        folder = Path(who.folder)
        # Not by the identity, which is that of the weights.
        key = (folder, *((folder / file).stat().st_mtime_ns for file in who.tokenizer_files))
        if key not in self._tokenizers:
            self._tokenizers[key] = _load_tokenizer(folder, self._path)
        return self._tokenizers[key]


def _named(adapters: Any) -> Mapping[str, str | os.PathLike[str]]:
    return adapters if isinstance(adapters, Mapping) else {}


def _is_list(prompts: Any) -> bool:
    """Of prompts; a list of token ids is one prompt."""
    return not isinstance(prompts, str) and not (len(prompts) > 0 and isinstance(prompts[0], int))


def _shows(progress: bool | None, count: int) -> bool:
    return sys.stderr.isatty() and count > 1 if progress is None else progress


def _find_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_tokenizer(folder: Path, model: Path) -> _Tokenizer:
    tokenizer = load_tokenizer(str(folder), None, trust_remote_code=False)
    config = load_config(str(model), None, trust_remote_code=False)
    eos = load_generation_eos(str(model), None) | eos_token_ids(config, tokenizer)
    return _Tokenizer(lambda text: list(tokenizer(text)["input_ids"]), make_detokenizer(tokenizer), eos)
