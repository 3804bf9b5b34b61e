"""Offline inference with the server's engine.

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
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from lorax_server.adapters.config import check_base_model
from lorax_server.adapters.in_memory import make_spec, move_to_host, parse_peft_config, release_tensors
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    InputError,
    LoraxError,
    NotSupportedError,
)
from lorax_server.generation import pooled_results as results
from lorax_server.generation.generation import Completion, Generation, TokenEvent
from lorax_server.generation.pooled_results import Entity, LabelScore
from lorax_server.gguf.model_folder import find_model_folder
from lorax_server.phases import Phases
from lorax_server.pooling import CLASSIFY, EMBED, GENERATE, SCORE, TOKEN_CLASSIFY, PoolingConfig, read_pooling
from lorax_server.process_tuning import short_gil_switch_interval
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output.trials import TRIAL_TASK, GrammarTrials
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.generation_defaults import load_generation_defaults
from lorax_server.text.prompt import Prompt, broadcast, encode_prompt, list_prompts
from lorax_server.text.tokenizer import EncodedText, TextTokenizer, load_tokenizer
from lorax_server.threads import completed_future, failed_future
from lorax_server.types import (
    AdapterRef,
    EngineStatus,
    Pooled,
    Request,
    ResolvedAdapter,
    SamplingParams,
    StopParams,
    Structure,
)

_T = TypeVar("_T")


class _Update(NamedTuple):
    """The weights that replace an adapter."""

    spec: AdapterSpec
    resolved: ResolvedAdapter


class LLM:
    """A model with its adapters, for offline inference. All methods are thread-safe, and concurrent calls share a
    batch.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        task: str = "auto",
        pooling: str | None = None,
        embedding_dim: int | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        `adapters` maps names to folders, or is one folder whose subfolders are adapters. `settings` are `EngineConfig`
        fields.
        """
        path = find_model_folder(Path(model))
        named = adapters if isinstance(adapters, Mapping) else {}
        self._folders = {adapter_id: Path(folder).resolve() for adapter_id, folder in named.items()}
        roots = [Path(adapters).resolve()] if isinstance(adapters, str | os.PathLike) else []
        # The root folder is allowed, because files may be links to any location, as in the hub cache. Only the named
        # folders are requested.
        roots += [Path(folder.anchor) for folder in self._folders.values()]
        settings.setdefault("sources", SourceConfig(tuple(dict.fromkeys(roots))))
        # Scripts submit all prompts together, so requests must not be rejected or time out while they wait.
        settings.setdefault("max_waiting", None)
        settings.setdefault("adapter_timeout_s", math.inf)
        if settings.get("draft_heads") is not None:
            settings["draft_heads"] = Path(settings["draft_heads"])
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        phases = Phases()
        with phases.measure("tokenizer"):
            self._tokenizer = load_tokenizer(path)
        self._eos_token_ids = load_generation_defaults(path).eos_token_ids
        self._sandbox = Sandbox(1)
        self._trials = GrammarTrials(self._sandbox, TRIAL_TASK._replace(max_pending=None))
        self._tokenizers = AdapterTokenizers(self._tokenizer, path, self._sandbox)
        self._update_lock = threading.Lock()  # held while an adapter is replaced; taken before `_lock`
        self._turn = threading.Lock()  # held while waiting for `_lock`, so that threads acquire `_lock` in turn
        self._lock = threading.Lock()  # guards the fields below
        uses: dict[str, Any] = {"task": task, "pooling": pooling, "embedding_dim": embedding_dim}
        config = EngineConfig(ModelConfig(path, dtype=dtype, device=device, quantize=quantize, **uses), **settings)
        self._has_ranks = config.tensor_parallel > 1
        self._pooling = read_pooling(config.model)  # None if the model generates text
        self._open_engine: Engine | None = build_engine(config, phases=phases)
        self.start_seconds: Mapping[str, float] = phases.seconds  # startup time by phase
        self._closed_error = EngineError("this LLM is closed")  # raised after the engine is closed
        self._generations: dict[int, Generation] = {}
        self._to_abort: deque[Generation] = deque()  # abandoned requests, to be aborted
        self._ids = itertools.count()
        self._num_finished = 0
        self._loaded: dict[str, set[str]] = {}  # loaded identities by adapter ID
        self._updates: dict[str, _Update] = {}  # by adapter ID

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
        """Generate completions for prompts (text or token IDs) in one batch. Return one completion per prompt.

        `params`, `stop`, `adapter` and `structure` apply to all prompts, or are lists with one entry per prompt. An
        `adapter` of None selects the base model. If `prompts` is a single prompt and `adapter` is a list, the prompt is
        sent to each adapter. The functions in `structured_output.grammars` create structures. `progress=True` shows a
        progress bar; None shows it only in a terminal. `on_error="return"` stores each error in its completion, instead
        of raising the first error.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return' (got {on_error!r})")
        self._check_task(GENERATE)
        listed = list_prompts(prompts)
        if len(listed) == 1 and isinstance(adapter, list | tuple) and len(adapter) > 1:
            listed = listed * len(adapter)  # not in place: the list may be the caller's
        adapter_ids = broadcast(adapter, str, "adapters", len(listed))
        samplings = broadcast(params, SamplingParams, "params", len(listed))
        stops = broadcast(stop, StopParams, "stops", len(listed))
        structures = broadcast(structure, Structure, "structures", len(listed))
        if progress is None:
            progress = sys.stderr.isatty() and len(listed) > 1
        runs: list[Generation] = []
        bar = tqdm(total=len(listed), unit="prompt", disable=not progress, dynamic_ncols=True)
        try:
            resolved = self._resolve_all(adapter_ids, on_error)
            for arguments in zip(listed, resolved, samplings, stops, structures, strict=True):
                runs.append(self._make_generation(*arguments, prompt_logprobs))
            for run, adapter_id in zip(runs, adapter_ids, strict=True):
                run.adapter_id = adapter_id
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
        """Generate a completion and yield an event for each token. Closing the iterator aborts the request."""
        self._check_task(GENERATE)
        resolved = self._resolve_all([adapter], "raise")[0]
        run = self._make_generation(prompt, resolved, params, stop, structure, False)
        run.adapter_id = adapter
        try:
            self._start(run, "raise")
            while True:
                with self._lock:  # another thread may append events
                    events, is_done = run.pop_events(), run.is_done
                yield from events
                if run.completion.error is not None:
                    raise run.completion.error
                if is_done:
                    return
                self._step()
        finally:
            self._stop([run])

    # --- Models that do not generate text -----------------------------------------------------------------------------

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts or token lists, `[texts, dimensions]`.

        `prompt_name` selects a prompt of the model. `truncate` keeps the beginning of texts that are too long.
        """
        config = self._check_task(EMBED)
        prompt = results.find_prompt(config, prompt_name)
        listed = list_prompts(texts)
        if prompt_name is not None and not all(isinstance(text, str) for text in listed):
            raise InputError("`prompt_name` has no effect on token IDs; put the prompt's tokens before them")
        prepared = [results.prepare_text(prompt, text, config) if isinstance(text, str) else text for text in listed]
        pooled = self._pool(prepared, config, adapter, truncate, progress)
        return np.array([results.to_embedding(each, config, dimensions) for _, each in pooled], np.float32)

    def classify(
        self,
        texts: str | Sequence[str],
        *,
        adapter: str | Sequence[str | None] | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> list[list[LabelScore]] | list[list[Entity]]:
        """Return the scores of all labels for each text, or the entities in each text (token classification)."""
        config = self._check_task(CLASSIFY, TOKEN_CLASSIFY)
        listed = [texts] if isinstance(texts, str) else list(texts)
        pooled = self._pool(listed, config, adapter, truncate, progress)
        if config.task == CLASSIFY:
            return [results.to_labels(each, config) for _, each in pooled]
        return [
            results.to_entities(each, config, text, encoded)
            for (encoded, each), text in zip(pooled, listed, strict=True)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        adapter: str | Sequence[str | None] | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> list[float]:
        """Return the relevance of each document to its query. One query applies to all documents."""
        config = self._check_task(CLASSIFY, SCORE)
        listed = [documents] if isinstance(documents, str) else list(documents)
        pairs = zip(broadcast(queries, str, "queries", len(listed)), listed, strict=True)
        texts = [results.prepare_pair(query or "", document, config, instruction) for query, document in pairs]
        pooled = self._pool(texts, config, adapter, truncate, progress)
        return [results.to_score(each, config) for _, each in pooled]

    def _check_task(self, *tasks: str) -> Any:
        task = GENERATE if self._pooling is None else self._pooling.task
        if task not in tasks:
            raise NotSupportedError(f"this model is loaded with task = {task}, not {' or '.join(tasks)}")
        return self._pooling

    def _pool(
        self,
        texts: Sequence[Any],
        config: PoolingConfig,
        adapter: str | Sequence[str | None] | None,
        truncate: bool,
        progress: bool | None,
    ) -> list[tuple[EncodedText, Pooled]]:
        """Return the tokens and results of texts, pairs of texts or token lists, with one entry per text."""
        adapter_ids, limit = broadcast(adapter, str, "adapters", len(texts)), self._engine.capabilities.max_length - 1
        progress = sys.stderr.isatty() and len(texts) > 1 if progress is None else progress
        bar, runs = tqdm(total=len(texts), unit="text", disable=not progress, dynamic_ncols=True), list[Generation]()
        try:
            adapters = self._resolve_all(adapter_ids, "raise")
            inputs = self._encode_all(texts, adapters, config, limit, truncate)
            params, stop = SamplingParams(), StopParams(max_new_tokens=1)
            for encoded, adapter_id, resolved in zip(inputs, adapter_ids, adapters, strict=True):
                assert isinstance(resolved, ResolvedAdapter)
                request = Request(
                    next(self._ids),
                    encoded.ids,
                    params,
                    stop,
                    adapter_identity=resolved.identity,
                    second_start=encoded.second_start,
                )
                runs.append(Generation(request, self._tokenizers.find(resolved).detokenizer))
                runs[-1].adapter_id = adapter_id
            for run in runs:
                self._start(run, "raise")
            self._finish(runs, bar, "raise")
        finally:
            bar.close()
            self._stop(runs)
        pooled = [run.completion.pooled for run in runs if run.completion.pooled is not None]
        return list(zip(inputs, pooled, strict=True))

    def _encode_all(
        self,
        texts: Sequence[Any],
        adapters: Sequence[ResolvedAdapter | LoraxError],
        config: PoolingConfig,
        limit: int,
        truncate: bool,
    ) -> list[EncodedText]:
        """Encode texts, pairs of texts and token lists. Texts with the same tokenizer are encoded in one call, which
        uses all cores.
        """
        found: dict[int, EncodedText] = {}
        groups: dict[TextTokenizer, list[int]] = {}
        for index, (text, resolved) in enumerate(zip(texts, adapters, strict=True)):
            assert isinstance(resolved, ResolvedAdapter)
            tokenizer = self._tokenizers.find(resolved)
            if isinstance(text, str | tuple):
                groups.setdefault(tokenizer, []).append(index)
            else:
                found[index] = EncodedText(encode_prompt(tokenizer, text)[: limit if truncate else None])
                results.check_length(len(found[index].ids), limit)
        for tokenizer, indices in groups.items():
            encoded = results.encode_inputs(tokenizer, [texts[index] for index in indices], config, limit, truncate)
            found |= zip(indices, encoded, strict=True)
        return [found[index] for index in range(len(texts))]

    # --- Adapters -----------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter_id: str, *, pin: bool = False) -> None:
        """Load an adapter to the device before the first request. `pin` protects it from eviction."""
        identity = self._wait_for(self._resolve(adapter_id)).identity
        with self._lock_engine():
            loading = self._engine.load(identity, pin or None)
            self._loaded.setdefault(adapter_id, set()).add(identity)
        self._wait_for(loading)

    def update_adapter(
        self, adapter_id: str, tensors: Mapping[str, torch.Tensor], config: Any = None, *, running: str = "finish"
    ) -> None:
        """Replace an adapter's weights. Requests that start after this call use the new weights.

        `tensors` has the same names as `adapter_model.safetensors`. Do not change the tensors until the call returns.
        Tensors on the model's GPU may still be computed on the current stream. `config` is a PEFT config or a mapping
        as in `adapter_config.json`; None keeps the current config. With `running="finish"`, unfinished requests keep
        the old weights. With `running="move"`, their next step uses the new weights with the existing KV cache. After
        an error, the old weights stay in use.
        """
        if running not in ("finish", "move"):
            raise InputError(f"running must be 'finish' or 'move' (got {running!r})")
        with self._update_lock, short_gil_switch_interval():
            self._replace(adapter_id, tensors, config, running)

    def _replace(self, adapter_id: str, tensors: Mapping[str, torch.Tensor], config: Any, running: str) -> None:
        capabilities = self._engine.capabilities
        present, before = self._find_present(adapter_id, config)
        parsed = parse_peft_config(config, adapter_id) if before is None else before.checkpoints[0].config
        check_base_model(parsed, capabilities.model_type, capabilities.model_class, None, capabilities.task)
        spec = make_spec(adapter_id, tensors, parsed, capabilities.max_inputs, self._has_ranks)
        try:
            packed = self._engine.pack(spec)
            if packed is None:
                move_to_host(spec)
            with self._lock_engine():
                is_pinned = any(each.is_pinned for each in self._engine.list_adapters([present.identity]))
                if packed is not None:
                    loading = self._engine.load_packed(spec, packed, is_pinned)
                else:
                    self._engine.register(spec)
                    loading = self._engine.load(spec.identity, is_pinned)
                has_switched = loading.done()
                if has_switched:
                    loading.result()
                    self._switch(adapter_id, spec, present, running)
                    self._run_step()  # copies the packed adapter
            while not has_switched:
                self._engine.wait()
                with self._lock_engine():
                    if not loading.done():
                        self._run_step()
                    if loading.done():  # switch before the next step
                        loading.result()
                        self._switch(adapter_id, spec, present, running)
                        has_switched = True
        except BaseException:
            with self._lock_engine():
                update = self._updates.get(adapter_id)
                if update is None or update.spec is not spec:  # otherwise, interrupted after the switch
                    self._engine.unload(spec.identity)
            raise
        finally:
            if not self._has_ranks:
                release_tensors(spec)

    def _find_present(self, adapter_id: str, config: Any) -> tuple[ResolvedAdapter, AdapterSpec | None]:
        """Return the current version of an adapter, and its spec, or None if `config` is given, which replaces it."""
        if config is None and (update := self._updates.get(adapter_id)) is not None:
            return update.resolved, update.spec
        try:
            present = self._wait_for(self._resolve(adapter_id))
        except AdapterNotFoundError:
            if config is None:
                raise
            return ResolvedAdapter(""), None
        if config is not None:
            return present, None
        with self._lock_engine():
            before = self._engine.find_spec(present.identity)
        if before is None:
            raise AdapterNotFoundError(
                f"adapter {adapter_id!r} was unloaded while it was being updated; pass its config"
            )
        return present, before

    def _switch(self, adapter_id: str, spec: AdapterSpec, present: ResolvedAdapter, running: str) -> None:
        """Use a loaded version of an adapter for new requests, and unload the version `present`."""
        if running == "move":
            runs = [run for run in self._generations.values() if run.adapter_id == adapter_id]
            self._engine.move([run.request.request_id for run in runs], spec.identity)
        self._updates[adapter_id] = _Update(spec, present._replace(identity=spec.identity, tier="", stale=None))
        old_identities = {*self._loaded.get(adapter_id, ()), present.identity}
        self._loaded[adapter_id] = {spec.identity}
        for identity in old_identities:
            self._engine.unload(identity)

    def unload_adapter(self, adapter_id: str) -> None:
        """Unload all adapter versions with this ID as soon as no request uses them."""
        identities = self._loaded.pop(adapter_id, set())
        try:
            identities.add(self._wait_for(self._resolve(adapter_id)).identity)
        except AdapterError:
            if not identities:
                raise
        with self._lock_engine():
            for identity in identities:
                self._engine.unload(identity)

    @property
    def status(self) -> EngineStatus:
        with self._lock_engine():
            return self._engine.status()

    def close(self) -> None:
        """Release all memory. Running requests fail."""
        self._sandbox.close()
        with self._lock_engine():
            engine, self._open_engine = self._open_engine, None
            self._generations.clear()
            if engine is not None:
                engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- Requests -----------------------------------------------------------------------------------------------------

    def _make_generation(
        self,
        prompt: Prompt,
        resolved: ResolvedAdapter | LoraxError,
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
            with self._lock_engine():
                update = self._updates.get(run.adapter_id or "")
                if update is not None:  # the adapter may have been updated after it was resolved
                    self._engine.register(update.spec)
                    run.request = replace(run.request, adapter_identity=update.spec.identity)
                self._engine.add(run.request)
                self._generations[run.request.request_id] = run
        except LoraxError as error:
            if on_error == "raise" or isinstance(error, EngineError):
                raise
            run.completion.error = error

    def _finish(self, runs: Sequence[Generation], bar: Any, on_error: str) -> None:
        unfinished = list(runs)
        while unfinished:
            num_finished = self._num_finished
            running = [run for run in unfinished if not run.is_done]
            failure = next((run.completion.error for run in unfinished if run.completion.error is not None), None)
            if failure is not None and on_error == "raise":
                raise failure
            bar.update(len(unfinished) - len(running))
            unfinished = running
            while unfinished and num_finished == self._num_finished:  # check the requests only after one has finished
                self._step()

    def _stop(self, runs: Sequence[Generation]) -> None:
        """Abort requests. This must not block, because Python may close an abandoned iterator even during a step."""
        self._to_abort.extend(run for run in runs if run.request.request_id in self._generations)
        if self._to_abort and self._lock.acquire(blocking=False):
            try:
                self._abort_abandoned()
            finally:
                self._lock.release()

    def _abort_abandoned(self) -> None:
        while self._to_abort:
            request_id = self._to_abort.popleft().request.request_id
            if self._generations.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _step(self) -> None:
        """Run one engine step, and deliver its outputs to the requests of all threads."""
        self._engine.wait()
        with self._lock_engine():
            self._run_step()

    def _run_step(self) -> None:
        """Run a step. The caller holds the lock."""
        engine = self._engine
        try:
            outputs = engine.step()
        except BaseException as error:  # the engine state is undefined now
            self._open_engine = None
            self._closed_error = EngineError(f"the engine of this LLM failed: {str(error) or type(error).__name__}")
            self._generations.clear()
            engine.close()
            raise
        for output in outputs:
            if (run := self._generations.get(output.request_id)) is None:
                continue
            try:
                run.append_output(output)
            except Exception as error:  # other requests must still get their outputs
                run.completion.error = LoraxError(f"invalid output: {str(error) or type(error).__name__}")
            if run.is_done:
                del self._generations[output.request_id]
                self._num_finished += 1
                if output.finish_reason is None and output.failure is None:
                    engine.abort(output.request_id)  # stopped by a stop string, which the engine does not check

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise EngineError(str(self._closed_error))
        return self._open_engine

    @contextmanager
    def _lock_engine(self) -> Iterator[None]:
        """Lock the engine, delay SIGINT, and abort abandoned requests."""
        with _delay_sigint():
            with self._turn:
                self._lock.acquire()
            try:
                self._abort_abandoned()
                yield
            finally:
                self._lock.release()

    # --- Adapters and text --------------------------------------------------------------------------------------------

    def _resolve_all(self, adapter_ids: Sequence[str | None], on_error: str) -> list[ResolvedAdapter | LoraxError]:
        """Resolve the adapters concurrently. Return one result or error per adapter ID."""
        futures = {
            adapter_id: self._resolve(adapter_id) for adapter_id in dict.fromkeys(adapter_ids) if adapter_id is not None
        }
        resolved: dict[str | None, ResolvedAdapter | LoraxError] = {None: ResolvedAdapter("")}
        for adapter_id, future in futures.items():
            try:
                resolved[adapter_id] = self._wait_for(future)
            except LoraxError as error:
                if on_error == "raise":
                    raise
                resolved[adapter_id] = error
        return [resolved[adapter_id] for adapter_id in adapter_ids]

    def _resolve(self, adapter_id: str) -> "Future[ResolvedAdapter]":
        """Resolve an adapter ID, and return a future. Adapter errors are set on the future."""
        if (update := self._updates.get(adapter_id)) is not None:
            with self._lock_engine():
                self._engine.register(update.spec)
            return completed_future(update.resolved)
        if self._folders and adapter_id not in self._folders:
            names = ", ".join(sorted(self._folders))
            return failed_future(AdapterNotFoundError(f"adapter {adapter_id!r} is unknown; known adapters: {names}"))
        with self._lock_engine():
            return self._engine.resolve([AdapterRef("local", str(self._folders.get(adapter_id, adapter_id)))])

    def _wait_for(self, future: "Future[_T]") -> _T:
        while not future.done():
            self._step()
        return future.result()


@contextmanager
def _delay_sigint() -> Iterator[None]:
    """Delay SIGINT, because an interrupted step would leave the engine in an undefined state."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signals: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *received: signals.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[0])
