"""Prepares adapters on a background thread: reads files, converts weights and computes norms while steps run."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import torch

from lorax_server.adapters.host import HostAdapter, check_ranks, prepare
from lorax_server.adapters.lora_layout import LoraLayout, ReusedMemory
from lorax_server.adapters.merge import MergedAdapter
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.weights import AdapterWeights, ModuleWeights, StoredAdapter
from lorax_server.distributed import ProcessGroup
from lorax_server.errors import AdapterError, EngineError, LoraxError
from lorax_server.kernels.device import is_host, make_stream, use_stream
from lorax_server.plan import PrepareResult
from lorax_server.worker.device_packer import DevicePacker

logger = logging.getLogger(__name__)

RANK_READY_TIMEOUT_S = 60.0  # maximum time to prepare an adapter that is ready on rank 0
MAX_PAUSE_S = 0.02  # maximum pause while the engine thread is busy
MAX_LAYOUTS = 16  # layouts take about 100 KB each


class Preparer:
    """Prepares adapters for one rank and keeps them in host memory.

    All ranks prepare the same adapters in the same order. They use a separate process group, because their collectives
    must not interfere with collectives in steps.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        group: ProcessGroup,
        *,
        max_rank: int | None = None,
        after_kv: Collection[str] = (),  # targets that no keys and values depend on
        packer: DevicePacker | None = None,  # for `pack`, without tensor parallelism
    ) -> None:
        self.notify: Callable[[], None] = lambda: None  # called on the background thread when a result is available
        self._targets = targets
        self._dtype = dtype
        self._group = group
        self._max_rank = max_rank
        self._after_kv = after_kv
        self._packer = packer
        weight = next((target.weight for target in targets.values() if target.weight is not None), None)
        # Norms of model weights are computed on a separate stream to avoid delaying steps.
        self._stream = None if weight is None else make_stream(weight.device)
        self._failure: Exception | None = None  # the preparer stops after a failure
        self._ready: dict[str, HostAdapter] = {}
        self._layouts: dict[str, LoraLayout] = {}  # of adapters that were passed as tensors, by name
        self._layouts_lock = threading.Lock()
        self._memory = ReusedMemory()
        self._added = threading.Condition()  # notified when `_ready` grows
        self._is_closed = False
        self._is_resumed = threading.Event()
        self._is_resumed.set()
        self._results: deque[PrepareResult] = deque()
        self._tasks: SimpleQueue[AdapterSpec | HostAdapter | None] = SimpleQueue()  # to prepare, or to free
        self._thread = threading.Thread(target=self._run, name="prepare adapters", daemon=True)
        self._thread.start()

    def enqueue(self, spec: AdapterSpec) -> None:
        self._tasks.put(spec)

    def pack(self, spec: AdapterSpec) -> PrepareResult | None:
        """Pack an in-memory adapter on the device, on the calling thread. Raise if its tensors or its config are
        invalid. Return None if it must be prepared in host memory.
        """
        weights = spec.checkpoints[0].in_memory
        if self._packer is None or weights is None or spec.merge is not None:
            return None
        _, layout = self._find_layout(spec, weights.tensors)
        host = None if layout is None else self._packer.pack(layout, weights.tensors)
        if host is None:
            return None
        weights.packed = host
        return replace(_make_result(spec, host), is_on_device=True)

    def add_packed(self, spec: AdapterSpec) -> None:
        """Add an adapter that `pack` has packed. `pop_results` does not return it."""
        weights = spec.checkpoints[0].in_memory
        assert weights is not None
        self._add_ready(spec, weights.packed)

    def get(self, identity: str) -> HostAdapter:
        """Return an adapter that is ready on rank 0. Wait until this rank has also prepared it."""
        with self._added:
            self._added.wait_for(lambda: identity in self._ready, RANK_READY_TIMEOUT_S)
            return self._ready[identity]

    def drop(self, identity: str) -> None:
        """Drop an adapter. The background thread frees the memory, because freeing takes milliseconds."""
        host = self.get(identity)
        with self._added:
            del self._ready[identity]
        self._tasks.put(host)

    def pop_results(self) -> list[PrepareResult]:
        """Return the results of preparations that finished or failed since the last call."""
        if self._failure is not None:
            raise EngineError("preparing an adapter failed on a tensor-parallel rank") from self._failure
        return [self._results.popleft() for _ in range(len(self._results))]

    def pause(self) -> None:
        """Pause the background thread while the engine thread is busy.

        The threads compete for the GIL. Without pauses, steps take up to three times as long.
        """
        self._is_resumed.clear()

    def resume(self) -> None:
        self._is_resumed.set()

    def close(self) -> None:
        self._is_closed = True
        self.resume()
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        with use_stream(self._stream):
            while (task := self._tasks.get()) is not None and not self._is_closed:
                if isinstance(task, AdapterSpec):
                    self._results.append(self._prepare(task))
                    self.notify()
                del task  # the last reference to a dropped adapter

    def _prepare(self, spec: AdapterSpec) -> PrepareResult:
        try:
            pause = partial(self._is_resumed.wait, MAX_PAUSE_S)
            host = self._pack(spec, pause)
            if self._stream is not None:
                self._stream.synchronize()
        except LoraxError as error:
            return PrepareResult(spec.identity, error=copy(error))  # without the traceback, which references tensors
        except Exception as error:  # the thread must survive a failing adapter
            if self._group.size() > 1:
                self._failure = error  # other ranks may be blocked in a collective, so all ranks must restart
            return PrepareResult(spec.identity, error=_make_unexpected_error(spec, error))
        self._add_ready(spec, host)
        return _make_result(spec, host)

    def _add_ready(self, spec: AdapterSpec, host: HostAdapter) -> None:
        with self._added:
            self._ready[spec.identity] = host
            self._added.notify_all()
        weights = spec.checkpoints[0].in_memory
        if self._packer is None or weights is None or is_host(host.buffer.device):
            return

        def replace_buffer(copied: HostAdapter) -> None:
            """Release the device memory of `pack`. Later loads use the host copy."""
            weights.packed = copied
            with self._added:
                if spec.identity in self._ready:
                    self._ready[spec.identity] = copied

        self._packer.start_fetch(host, replace_buffer)

    def _pack(self, spec: AdapterSpec, pause: Callable[[], object]) -> HostAdapter:
        weights = spec.checkpoints[0].in_memory
        if weights is None or spec.merge is not None or self._group.size() > 1:
            return prepare(self._open(spec), self._targets, self._dtype, self._group, pause, self._after_kv)
        if weights.packed is None:
            weights.packed = self._pack_tensors(spec, weights.tensors, pause)
        packed: HostAdapter = weights.packed
        return packed

    def _pack_tensors(
        self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], pause: Callable[[], object]
    ) -> HostAdapter:
        adapter, layout = self._find_layout(spec, tensors)
        host = None
        if layout is not None:
            pause()
            is_parallel = self._stream is not None  # on a CPU, other threads would delay steps
            host = layout.pack(tensors, self._memory, pause, is_parallel)
        if host is not None:
            return host
        # The adapter has other weights than LoRA factors, or invalid values.
        return prepare(adapter or self._read(spec), self._targets, self._dtype, self._group, pause, self._after_kv)

    def _find_layout(
        self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[StoredAdapter | None, LoraLayout | None]:
        """Return the layout of an in-memory adapter, or None if it has other weights than LoRA factors. Also return the
        adapter if it had to be checked.
        """
        adapter = None
        with self._layouts_lock:
            layout = self._layouts.pop(spec.name, None)
            if layout is None or not layout.fits(spec.checkpoints[0].config, tensors):
                opened = self._read(spec)
                assert isinstance(opened, StoredAdapter)
                adapter = opened
                layout = LoraLayout.find(adapter, tensors, self._targets, self._dtype, self._after_kv)
            if layout is not None:
                self._layouts[spec.name] = layout
                if len(self._layouts) > MAX_LAYOUTS:
                    del self._layouts[next(iter(self._layouts))]  # the least recently used layout
        return adapter, layout

    def _open(self, spec: AdapterSpec) -> AdapterWeights:
        """Open and return an adapter. If one rank cannot read it, raise on all ranks."""
        adapter: AdapterWeights | None = None
        failure: LoraxError | None = None
        try:
            adapter = self._read(spec)
        except LoraxError as error:
            failure = error
        except Exception as error:  # reported to the other ranks, which wait for this rank
            failure = _make_unexpected_error(spec, error)
        if self._group.size() > 1:
            flags = self._group.all_gather(torch.tensor([failure is not None]), dim=0)
            if bool(flags.any()) and failure is None:
                failure = AdapterError(f"adapter {spec.name!r}: another tensor-parallel rank cannot read it")
        if failure is not None:
            raise failure
        assert adapter is not None
        return adapter

    def _read(self, spec: AdapterSpec) -> AdapterWeights:
        stored = [
            StoredAdapter(
                part.folder,
                part.config,
                self._targets,
                part.stamp,
                None if part.in_memory is None else part.in_memory.tensors,
            )
            for part in spec.checkpoints
        ]
        adapter: AdapterWeights = stored[0] if spec.merge is None else MergedAdapter(stored, spec.merge)
        check_ranks(adapter, self._targets, self._max_rank)
        recent = [i for i, part in enumerate(spec.checkpoints) if not part.is_settled]
        if self._group.size() == 1 and not recent:
            return adapter
        # Read all tensors now: a read error later would leave other ranks blocked in a collective.
        in_memory = _InMemoryAdapter(adapter)
        for i in recent:  # recently modified files may change again without a new timestamp
            if stored[i].compute_identity() != spec.checkpoints[i].identity:
                raise AdapterError(f"adapter {stored[i].name!r}: files changed during loading; retry the request")
        return in_memory


def _make_result(spec: AdapterSpec, host: HostAdapter) -> PrepareResult:
    sizes = host.units, host.buffer.nbytes, host.vocab_size
    return PrepareResult(spec.identity, *sizes, changes_kv=host.changes_kv)


def _make_unexpected_error(spec: AdapterSpec, error: Exception) -> AdapterError:
    """Log an unexpected error (a bug or out of memory) and return an AdapterError."""
    logger.error("adapter %r cannot be prepared", spec.name, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        where = " on the GPU" if isinstance(error, torch.OutOfMemoryError) else ""
        return AdapterError(
            f"adapter {spec.name!r}: cannot be prepared: out of memory{where}; retry, or lower cache_bytes, "
            "adapter_bytes or adapter_host_bytes"
        )
    return AdapterError(f"adapter {spec.name!r}: cannot be prepared: {type(error).__name__}")


class _InMemoryAdapter:
    """Adapter weights that were read into memory completely."""

    def __init__(self, adapter: AdapterWeights) -> None:
        self.name = adapter.name
        self.vocab_size = adapter.vocab_size
        self._ranks = {module: adapter.find_rank(module) for module in adapter.modules}
        self._modules: dict[str, ModuleWeights] = {module: adapter.load(module) for module in adapter.modules}

    @property
    def modules(self) -> list[str]:
        return list(self._ranks)

    def find_rank(self, module: str) -> int:
        return self._ranks[module]

    def load(self, module: str) -> ModuleWeights:
        return self._modules.pop(module)  # release the weights, because each module is loaded only once
