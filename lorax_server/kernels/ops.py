"""The op table: the functions that a set of kernels must offer. A module with all of them is such a set.

Keys and values lie in blocks: two tensors `[num_blocks, num_kv_heads, block_size, head_dim]` for each layer. The tokens
of a block lie next to each other for each head, so attention reads whole stretches. A slot is
`block * block_size + offset`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels.panels import PanelMatrix
from lorax_server.kernels.sampling import ChosenRows, RowBatch, RowInputs

T = TypeVar("T")

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer
CosSin = tuple[torch.Tensor, torch.Tensor]  # of the angles that heads are rotated by: each [num_tokens, half], float32


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of one layer's attention."""

    scale: float
    window: int | None = None  # number of tokens that a query sees, itself included; None for all before it
    k_scale: float = 1.0  # a float8 cache stores keys and values divided by these
    v_scale: float = 1.0
    soft_cap: float | None = None  # scores are squeezed into this range by `cap * tanh(score / cap)`; None for no limit
    # [num_heads] float32 on the device, of ALiBi: a score loses its head's slope for each token between query and key.
    slopes: torch.Tensor | None = field(default=None, compare=False)

    @property
    def reach(self) -> int:
        """Return the window as kernels take it: without one, more tokens than any sequence has."""
        return 2**30 if self.window is None else self.window


class Activation(NamedTuple):
    """An activation by the name that configs use, so that a kernel can have it built in."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Remembers:
    """Keeps values that are derived once: those that the first layer derives from a batch, for the layers after it."""

    derived: dict[Hashable, Any]

    def once(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        if key in self.derived:
            value: T = self.derived[key]
            return value
        return cast(T, self.derived.setdefault(key, make(*arguments)))  # another thread may have been faster


@dataclass(frozen=True, eq=False)
class LinearWeights(Remembers):
    """`x @ weight.T + bias`, as the `make_linear` of a set of kernels lays it out."""

    weight: torch.Tensor | PanelMatrix  # [out, in]
    bias: torch.Tensor | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def plain(self) -> torch.Tensor:
        """Return the matrix as a tensor: a copy, if it lies in panels."""
        return self.weight.read() if isinstance(self.weight, PanelMatrix) else self.weight


class HostLengths(NamedTuple):
    """The lengths of a batch's sequences on the host."""

    inputs: list[int]  # tokens of this forward
    cached: list[int]  # tokens in the cache before it


@dataclass(frozen=True)
class PagedBatch(Remembers):
    """The lengths of the sequences of one forward, and the places of their tokens in the cache.

    Every layer gets the same batch. All tensors are on the device: reading one on the host waits for the device.

    A batch in a graph is padded. Its last sequences may have no tokens. Its last tokens may belong to none: they have
    no slot, and whatever attention leaves in their rows reaches no other row.
    """

    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    input_lengths: torch.Tensor  # [num_seqs] tokens of this forward
    cache_lengths: torch.Tensor  # [num_seqs] tokens in the cache before this forward
    slots: torch.Tensor  # [num_stored] where keys and values go; -1 for nowhere
    stored: torch.Tensor | None = None  # [num_stored] the tokens that `slots` belong to; None for all
    cu_seqlens: torch.Tensor | None = None  # [num_seqs + 1] bounds of the sequences; None if each has one token
    host_lengths: "HostLengths | None" = None  # copies on the host, where the caller has them
    stores_all: bool = False  # whether the caller knows that each token has a slot, so that the cache holds all
    in_graph: bool = False  # whether a graph is replayed with other lengths, so that the host knows none of them
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def read_lengths(self) -> "HostLengths":
        """Return the lengths on the host. This waits for the device, if the caller has given none."""
        return self.host_lengths or HostLengths(self.input_lengths.tolist(), self.cache_lengths.tolist())


class Field(IntEnum):
    """Columns of the adapters' table. The first seven are offsets into the buffer, -1 where an adapter has nothing.

    Offsets are multiples of 256 bytes on a GPU, whose kernels load several elements at once.
    """

    A = 0  # [rank, in]; of an embedding [in, rank], so that a token's part is one row
    B = 1  # [rank, out]
    FACTOR = 2  # [out] the output is multiplied by this
    SHIFT = 3  # [out] and this is then added
    ROW_IDS = 4  # [rows] int32, ascending: which of this rank's tokens have a row of their own
    ROWS = 5  # [rows, size] those rows
    NEW_ROWS = 6  # [new rows, size] rows of the tokens that come after the base model's vocabulary
    RANK = 7
    NUM_ROWS = 8
    NUM_NEW_ROWS = 9


NUM_OFFSETS = Field.RANK
GRAPH_RANK = 64  # the largest rank, and
GRAPH_SEGMENTS = 320  # the most segments, of a batch that a graph of more than a decode step's tokens is replayed with
MAX_RANK = 512  # of a linear's LoRA factors that the kernels of a GPU serve


@dataclass(frozen=True)
class LoraTarget:
    """A row of the table's second dimension, and the columns of its outputs among those of its layer."""

    index: int
    columns: slice


@dataclass(frozen=True)
class EmbeddingTarget:
    """A row of the table's second dimension that belongs to an embedding, and this rank's part of the vocabulary."""

    index: int
    vocab: range  # the tokens that this rank holds
    vocab_size: int  # of the base model, all ranks together
    adds_new_rows: bool  # whether this rank has the rows of added tokens


class _Has(NamedTuple):
    """Flags by target: true where any adapter of a batch has weights of this kind."""

    low_rank: list[bool]
    vectors: list[bool]
    rows: list[bool]


@dataclass(frozen=True)
class LoraBatch(Remembers):
    """The adapters of a batch of tokens: where the weights of all lie, and which tokens belong to which.

    Tensors are on the device, but for `host_table`. They stay in their places when a batch is captured in a graph, and
    the graph is replayed with other adapters. So a captured kernel reads nothing of the host's side, which is empty
    then.
    """

    buffer: torch.Tensor  # [num_elements]
    table: torch.Tensor  # [num_adapters, num_targets, len(Field)]; adapter 0 is the base model and has nothing
    scales: torch.Tensor  # [num_adapters, num_targets]
    widths: torch.Tensor  # [num_targets, 2] inputs and outputs
    adapter_indices: torch.Tensor  # [num_tokens] int32; tokens of one adapter follow one another
    # --- on the host ---
    host_table: torch.Tensor  # a copy of `table`
    bounds: list[int]  # segment i, a run of one adapter's tokens, is tokens bounds[i] to bounds[i + 1]
    adapters: list[int]  # of each segment
    in_graph: bool = False  # whether a graph is replayed with other adapters, so that the host knows none of them
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def has_low_rank(self, targets: Sequence[LoraTarget]) -> bool:
        return any(self._has.low_rank[target.index] for target in targets)

    def has_vectors(self, targets: Sequence[LoraTarget]) -> bool:
        return any(self._has.vectors[target.index] for target in targets)

    def changes(self, targets: Sequence[LoraTarget]) -> bool:
        """Return whether any adapter changes the output of these targets by factors, or by rows of its own."""
        return self.has_low_rank(targets) or self.has_vectors(targets) or any(self.has_rows(t.index) for t in targets)

    def has_rows(self, index: int) -> bool:
        return self._has.rows[index]

    @property
    def largest_ranks(self) -> list[int]:
        """Return by target the largest rank among the batch's adapters."""
        return self.once("ranks", self._find_ranks)

    @property
    def fits_graph(self) -> bool:
        """Tell whether a graph of prompts can be replayed with these adapters."""
        return len(self.adapters) <= GRAPH_SEGMENTS and max(self.largest_ranks, default=0) <= GRAPH_RANK

    def learn_from(self, other: "LoraBatch") -> None:
        """Take over what another batch has found out of its adapters, if they are the same ones, in whatever order."""
        if set(self.adapters) == set(other.adapters):
            self.derived.update((key, other.derived[key]) for key in ("most", "has", "ranks") if key in other.derived)

    @property
    def _most(self) -> npt.NDArray[np.int64]:
        """Return by target and field the highest number of any adapter of the batch."""
        return self.once("most", lambda: self.host_table.numpy()[sorted({0, *self.adapters})].max(0))

    def _find_ranks(self) -> list[int]:
        if self.in_graph:
            return [GRAPH_RANK] * self.table.shape[1]
        ranks: list[int] = self._most[:, Field.RANK].tolist()
        return ranks

    @property
    def _has(self) -> _Has:
        return self.once("has", self._find_kinds)

    def _find_kinds(self) -> _Has:
        if self.in_graph:
            return _Has(*([True] * self.table.shape[1] for _ in range(3)))
        most = self._most
        low_rank = most[:, Field.RANK] > 0
        vectors = (most[:, Field.FACTOR] >= 0) | (most[:, Field.SHIFT] >= 0)
        rows = (most[:, Field.NUM_ROWS] > 0) | (most[:, Field.NUM_NEW_ROWS] > 0)
        return _Has(low_rank.tolist(), vectors.tolist(), rows.tolist())


class UnrecordableError(Exception):
    """A run did something that no graph can replay, which the message names."""


class RecordedGraph(Protocol):
    """A recorded run. The tensors that it reads must stay in their places."""

    output: torch.Tensor  # of the last replay

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records runs of a model's layers. The graphs share the memory of what they compute on the way."""

    def record(self, run: Callable[[], torch.Tensor], rows: int) -> RecordedGraph:
        """Record a run over so many rows without running it. Raise `UnrecordableError` if that is impossible.

        Only one thread may use the ops meanwhile.
        """
        ...


ChooseRows = Callable[[RowBatch, RowInputs], ChosenRows]


class Ops(Protocol):
    """The table. A cache and a tensor named `out` are written; all else is only read, unless a docstring says so.

    Queries are `[num_tokens, num_heads, head_dim]`, and so are the results of attention. Keys and values are
    `[num_tokens, num_kv_heads, head_dim]`. Logits are `[rows, vocabulary]` of any dtype.
    """

    # --- capabilities ---

    @property
    def records_graphs(self) -> bool:
        """Return True if the kernels of a step read nothing on the host, so that a graph can replay them."""
        ...

    @property
    def has_fast_bfloat16(self) -> bool:
        """Return True if bfloat16 is at least as fast as float32."""
        ...

    @property
    def max_lora_rank(self) -> int | None:
        """Return the largest rank that LoRA at a linear may have; None if there is no limit."""
        ...

    @property
    def choose_rows(self) -> ChooseRows | None:
        """Return a kernel that samples all rows of a batch by all parameters; None if there is none."""
        ...

    def make_recorder(self, max_rows: int) -> "Recorder | None":
        """Return a recorder for steps of up to `max_rows` tokens; None if graphs are CUDA graphs, or there are none."""
        ...

    # --- layers ---

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Rotate queries and keys by the angles of their tokens, store keys and values in their slots, and attend.

        Each token attends to the tokens of its sequence up to itself, those that were cached before and those of this
        forward. With n / 2 angles the first n dimensions of a head turn: dimension i with dimension i + n / 2. Whether
        `q` and `k` are rotated themselves is left open.
        """
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: torch.Tensor,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x + residual` normalised, then scaled and shifted by each token's adapter, and that sum itself.

        `eps` is one float32. A weight of the rows' dtype multiplies what is rounded to it; one of float32 multiplies
        before that.
        """
        ...

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> torch.Tensor:
        """Return each row less its mean, divided by its deviation, then scaled and shifted by its token's adapter."""
        ...

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        """Return `x @ weight.T + bias`, changed by each token's adapter.

        An adapter adds its scaled `x @ A.T @ B`, then multiplies by its factor and adds its shift, where it has them.
        The targets lie side by side in the output and follow one another in the table.
        """
        ...

    def gated_linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        activation: Activation,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        """Return `activation(gate) * up` of the two halves of what `linear` returns."""
        ...

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Add each token's scaled `x @ A.T @ B` of its own adapter to `out`."""
        ...

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Multiply each token's output by its adapter's factor and add its adapter's shift, where it has them."""
        ...

    def look_up(self, weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, `[*ids, size]`. An id that is no row's is refused, on a CPU at once."""
        ...

    def adapt_embedding(self, out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
        """Change, in place, the rows of the base model that were looked up for `ids`, each by its token's adapter.

        A row of the adapter's own replaces the base model's. Then comes the product of its factors, then factor and
        shift. Last, the adapter's rows of added tokens replace all else. Tokens that other ranks hold have rows of
        zeros, which stay.
        """
        ...

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
        """Lay out a matrix `[out, in]` as these kernels read it."""
        ...

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:
        """Compile the kernels that these linears need, so that no request waits for them."""
        ...

    def plan_lora(self, lora: LoraBatch, current: LoraBatch) -> None:
        """Work out again, in place, what was derived of a batch in a graph, which has the adapters of another now."""
        ...

    # --- sampling ---

    def choose_greedy(
        self, logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows] the likeliest token, the first of equals, and [rows] float32 its log probability.

        `words`, [masks, words] int32, are token masks: a bit for each token, set if it is allowed. A row has the mask
        of its number, [rows] int64, and chooses as if all other tokens had a score of -infinity. A negative number
        means no mask.
        """
        ...

    def find_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """Return [rows, count] float32 the log probabilities of [rows, count] tokens that masks allow, by scores that
        are divided by [rows] temperatures, if there are any."""
        ...

    def find_best(
        self,
        logits: torch.Tensor,
        count: int,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows, count] float32 the best scores, the best first and a NaN above all, and their tokens: any
        tokens with -infinity where a mask allows fewer."""
        ...
