"""Prepares adapters on a thread of its own, so that no step waits for a file, a cast or a norm."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from queue import SimpleQueue

import torch

from lorax_server.adapters.host import HostAdapter, check_ranks, prepare
from lorax_server.adapters.merge import MergedAdapter
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.weights import AdapterWeights, ModuleWeights, StoredAdapter
from lorax_server.distributed import ProcessGroup
from lorax_server.errors import AdapterError, EngineError, LoraxError
from lorax_server.kernels.device import make_stream, use_stream
from lorax_server.plan import Prepared

logger = logging.getLogger(__name__)

READY_S = 60.0  # for another rank to have an adapter that the first rank has
REST_S = 0.02  # the longest rest, however long the engine's thread is busy


class Preparer:
    """One rank's adapters in host memory.

    All ranks prepare the same adapters in the same order. Their group is not that of the steps, so that sums over ranks
    made here never meet the sums of a step.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        group: ProcessGroup,
        *,
        max_rank: int | None = None,
    ) -> None:
        self.notify: Callable[[], None] = lambda: None  # called, on the thread, when there is something to take
        self._targets = targets
        self._dtype = dtype
        self._group = group
        self._max_rank = max_rank
        weight = next((target.weight for target in targets.values() if target.weight is not None), None)
        # For norms over the model's weights, so that no step waits behind them.
        self._stream = None if weight is None else make_stream(weight.device)
        self._failure: Exception | None = None  # after which nothing can be prepared
        self._ready: dict[str, HostAdapter] = {}
        self._added = threading.Condition()  # to `_ready`
        self._is_closed = False
        self._may_work = threading.Event()
        self._may_work.set()
        self._results: deque[Prepared] = deque()
        self._tasks: SimpleQueue[AdapterSpec | HostAdapter | None] = SimpleQueue()  # to prepare, or to free
        self._thread = threading.Thread(target=self._run, name="prepare adapters", daemon=True)
        self._thread.start()

    def enqueue(self, spec: AdapterSpec) -> None:
        self._tasks.put(spec)

    def get(self, identity: str) -> HostAdapter:
        """Return an adapter that the first rank has. All ranks have agreed on it; this one may be a moment behind."""
        with self._added:
            self._added.wait_for(lambda: identity in self._ready, READY_S)
            return self._ready[identity]

    def drop(self, identity: str) -> None:
        """Give an adapter up. The thread frees its memory, which takes milliseconds, before it prepares the next."""
        host = self.get(identity)
        del self._ready[identity]
        self._tasks.put(host)

    def take_results(self) -> list[Prepared]:
        """Return the adapters that have become ready, or failed, since the last call."""
        if self._failure is not None:
            raise EngineError("the ranks do not agree on an adapter any more") from self._failure
        return [self._results.popleft() for _ in range(len(self._results))]

    def rest(self) -> None:
        """Let the thread rest while the engine's thread has work to do: only one of them can run Python, and each would
        wait for the other at every operation. Steps took up to three times as long."""
        self._may_work.clear()

    def go_on(self) -> None:
        self._may_work.set()

    def close(self) -> None:
        self._is_closed = True
        self.go_on()
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        with use_stream(self._stream):
            while (task := self._tasks.get()) is not None and not self._is_closed:
                if isinstance(task, AdapterSpec):
                    self._results.append(self._prepare(task))
                    self.notify()
                del task  # the last that holds a dropped adapter

    def _prepare(self, spec: AdapterSpec) -> Prepared:
        try:
            pause = partial(self._may_work.wait, REST_S)
            host = prepare(self._open(spec), self._targets, self._dtype, self._group, pause)
            if self._stream is not None:
                self._stream.synchronize()
        except LoraxError as error:
            return Prepared(spec.identity, error=copy(error))  # without its traceback, which holds the tensors
        except Exception as error:  # one adapter must not end the thread
            if self._group.size() > 1:
                self._failure = error  # other ranks may wait in the middle of a sum: all must be started again
            return Prepared(spec.identity, error=_explain(spec, error))
        with self._added:
            self._ready[spec.identity] = host
            self._added.notify_all()
        return Prepared(spec.identity, host.units, host.buffer.nbytes, host.vocab_size)

    def _open(self, spec: AdapterSpec) -> AdapterWeights:
        """Open an adapter on all ranks or on none."""
        adapter: AdapterWeights | None = None
        refusal: LoraxError | None = None
        try:
            adapter = self._read(spec)
        except LoraxError as error:
            refusal = error
        except Exception as error:  # tell the other ranks, which would wait for this one
            refusal = _explain(spec, error)
        if self._group.size() > 1:
            flags = self._group.all_gather(torch.tensor([refusal is not None]), dim=0)
            if bool(flags.any()) and refusal is None:
                refusal = AdapterError(f"adapter {spec.name!r}: another tensor-parallel rank cannot read it")
        if refusal is not None:
            raise refusal
        assert adapter is not None
        return adapter

    def _read(self, spec: AdapterSpec) -> AdapterWeights:
        stored = [StoredAdapter(part.folder, part.config, self._targets, part.stamp) for part in spec.parts]
        adapter: AdapterWeights = stored[0] if spec.merge is None else MergedAdapter(stored, spec.merge)
        check_ranks(adapter, self._targets, self._max_rank)
        recent = [i for i, part in enumerate(spec.parts) if not part.is_settled]
        if self._group.size() == 1 and not recent:
            return adapter
        # A rank that fails to read in the middle would leave the others waiting: so all is read before.
        in_memory = _InMemory(adapter)
        for i in recent:  # the files may have changed once more without a new stamp
            if stored[i].identify() != spec.parts[i].identity:
                raise AdapterError(f"adapter {stored[i].name!r}: changed while it was read; try again")
        return in_memory


def _explain(spec: AdapterSpec, error: Exception) -> AdapterError:
    """Report an unexpected error: a bug of ours, or too little memory."""
    logger.error("adapter %r cannot be prepared", spec.name, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        where = " on the GPU" if isinstance(error, torch.OutOfMemoryError) else ""
        return AdapterError(
            f"adapter {spec.name!r}: cannot be prepared: out of memory{where}; try again, or give less to other things "
            "(cache_bytes, adapter_bytes, adapter_host_bytes)"
        )
    return AdapterError(f"adapter {spec.name!r}: cannot be prepared: {type(error).__name__}")


class _InMemory:
    """An adapter whose tensors have all been read."""

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
        return self._modules.pop(module)  # each is loaded once, and then takes no memory here
