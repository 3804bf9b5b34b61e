"""`Ops`, the interface of all kernel backends, and the batch descriptions that ops receive.

Each layer's KV cache is two tensors `[num_blocks, num_kv_heads, block_size, head_dim]`, so the tokens in a block are
contiguous for each head. A cache slot is `block * block_size + offset`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.quantized import QuantizedMatrix
from lorax_server.kernels.sampling import SampledTokens, SamplingBatch, SamplingInputs

T = TypeVar("T")

LayerCache = tuple[torch.Tensor, torch.Tensor]  # key cache and value cache of one layer
CosSin = tuple[torch.Tensor, torch.Tensor]  # RoPE cosines and sines: each [num_tokens, half], float32


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention settings, which are constant after loading."""

    scale: float
    window: int | None = None  # sliding window in tokens, including the query; None for full attention
    k_scale: float = 1.0  # a float8 cache stores keys and values divided by the scales
    v_scale: float = 1.0
    soft_cap: float | None = None  # scores become `cap * tanh(score / cap)`; None for no cap
    # ALiBi slopes, [num_heads] float32 on the device: a score decreases by the slope for each token of distance.
    slopes: torch.Tensor | None = field(default=None, compare=False)
    # Attention sinks, [num_heads] float32 on the device: a score that each head's softmax includes, without a value.
    sinks: torch.Tensor | None = field(default=None, compare=False)
    # The next two fields apply only to `attend_sequences`. Without causality, the window extends in both directions.
    is_causal: bool = True
    # Learned bias for each distance of key and query, [num_heads, 2 * max_distance + 1] float32.
    position_bias: torch.Tensor | None = field(default=None, compare=False)

    @property
    def window_or_max(self) -> int:
        """Return the sliding window, or a number larger than any sequence length if there is no window."""
        return 2**30 if self.window is None else self.window


class Activation(NamedTuple):
    """An activation function and its name in model configs. Some kernels fuse activations, selected by name."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    up_function: Callable[[torch.Tensor], torch.Tensor] | None = None  # applied to the up projection of gated MLPs
    parameters: tuple[float, ...] = ()  # of both functions, for kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def apply_gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.function(gate) * (up if self.up_function is None else self.up_function(up))


SIGMOID = Activation("sigmoid", torch.sigmoid)


class DerivedCache:
    """Caches values that are derived from a batch or a matrix, so that later layers or steps can reuse them."""

    derived: dict[Hashable, Any]

    def cached(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        if key in self.derived:
            value: T = self.derived[key]
            return value
        return cast(T, self.derived.setdefault(key, make(*arguments)))  # another thread may have been faster


@dataclass(frozen=True, eq=False)
class LinearWeights(DerivedCache):
    """Weights of `x @ weight.T + bias`, in the layout that `Ops.make_linear` chose."""

    weight: torch.Tensor | StoredMatrix  # [out, in]
    bias: torch.Tensor | None = None
    rounds_inputs: bool = False  # if True, the product (without adapters) rounds `x` with `quantized.round_rows`
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape
        return outputs, inputs

    @property
    def is_quantized(self) -> bool:
        """Return True if the matrix is not a tensor, so that `plain` copies it."""
        return isinstance(self.weight, StoredMatrix)

    @property
    def plain(self) -> torch.Tensor:
        """Return the matrix as a tensor (a copy if the matrix is quantized or stored in panels)."""
        return self.weight.read() if isinstance(self.weight, StoredMatrix) else self.weight


@dataclass(frozen=True, eq=False)
class ExpertWeights(DerivedCache):
    """Weights of the gated MLPs in a mixture of experts, in the layout that `Ops.make_experts` chose."""

    gate_up: Sequence[LinearWeights]  # one per expert: [2 * inner, hidden]
    down: Sequence[LinearWeights]  # one per expert: [hidden, inner]
    activation: Activation
    # All gate and up, and all down matrices, and biases `[experts, outputs]`, for kernels that run several experts in
    # one launch.
    stacked: tuple["StackedMatrices", "StackedMatrices"] | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)


class StackedMatrices(NamedTuple):
    weight: torch.Tensor | StoredMatrix  # [experts, outputs, inputs], or quantized: [experts * outputs, inputs]
    bias: torch.Tensor | None


class ExpertMatrices(NamedTuple):
    """The matrices of one expert, as loaded from a checkpoint."""

    gate_up: torch.Tensor | QuantizedMatrix
    down: torch.Tensor | QuantizedMatrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class Routing(NamedTuple):
    """The experts that the router chose for each token, and the weights of their outputs."""

    experts: torch.Tensor  # [num_tokens, top_k] int64, distinct in each row
    weights: torch.Tensor  # [num_tokens, top_k] float32


@dataclass(frozen=True)
class RouterSpec:
    """A router's settings for choosing experts and weighting their outputs, which are constant after loading."""

    normalize: bool  # divide the weights of a token by their sum
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # computes the scores from the logits
    # Only experts in the `top_groups` best of `groups` groups are chosen. Groups are ranked by their best score
    # (softmax) or by the sum of their two best scores (sigmoid).
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0  # multiplies the weights

    @property
    def scores_per_group(self) -> int:
        """Return how many of a group's best scores are summed to rank the group."""
        return 1 if self.scoring == "softmax" else 2


class HostLengths(NamedTuple):
    """A batch's sequence lengths in host memory."""

    inputs: list[int]  # tokens in this forward pass
    cached: list[int]  # tokens in the cache before the forward pass


@dataclass(frozen=True)
class PagedBatch(DerivedCache):
    """The sequence lengths and KV cache locations for one forward pass. All layers receive the same batch.

    All tensors are on the device, so reading a tensor on the host synchronizes.

    A batch in a graph is padded. Padding sequences have no tokens. Padding tokens have no sequence and no cache slot;
    their attention output is undefined and never affects other rows.
    """

    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    input_lengths: torch.Tensor  # [num_seqs] tokens in this forward pass
    cache_lengths: torch.Tensor  # [num_seqs] tokens in the cache before this forward pass
    slots: torch.Tensor  # [num_stored] KV cache slot for each token in `stored`, or -1 to skip it
    stored: torch.Tensor | None = None  # [num_stored] token index of each slot; None: all tokens
    cu_seqlens: torch.Tensor | None = None  # [num_seqs + 1] sequence boundaries; None if each sequence has one token
    host_lengths: "HostLengths | None" = None  # lengths on the host, if the caller has them
    stores_all: bool = False  # True if every token has a cache slot, so that attention can read all keys from the cache
    in_graph: bool = False  # True if the batch is captured in a graph, so host lengths are unknown at replay
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def read_lengths(self) -> "HostLengths":
        """Return the sequence lengths on the host. Synchronizes with the device unless `host_lengths` is set."""
        return self.host_lengths or HostLengths(self.input_lengths.tolist(), self.cache_lengths.tolist())


class Field(IntEnum):
    """Columns of the adapter table. The first seven are buffer offsets, or -1 if the adapter has no such weights.

    On a GPU, offsets are multiples of 256 bytes, as vector loads require.
    """

    A = 0  # [rank, in]; for embeddings [in, rank], so each token reads one row; for experts [experts, rank, in]
    B = 1  # [rank, out]; for experts [experts, rank, out]
    OUTPUT_SCALE = 2  # [out] multiplies the output
    OUTPUT_BIAS = 3  # [out] added after the output scale is applied
    ROW_IDS = 4  # [rows] int32, ascending: local token IDs with adapter-specific rows
    ROWS = 5  # [rows, size] the adapter-specific rows
    NEW_ROWS = 6  # [new rows, size] rows for token IDs beyond the base vocabulary
    RANK = 7
    NUM_ROWS = 8
    NUM_NEW_ROWS = 9


NUM_OFFSETS = Field.RANK
# Limits for batches that replay a prefill graph: LoRA rank and number of LoRA segments.
GRAPH_RANK = 64
GRAPH_SEGMENTS = 320
MAX_RANK = 512  # largest LoRA rank in the GPU kernels for linear layers


@dataclass(frozen=True)
class LoraTarget:
    """A target module's index in the adapter table, and its columns within the layer's output."""

    index: int
    columns: slice


@dataclass(frozen=True)
class EmbeddingTarget:
    """An embedding's index in the adapter table, and its vocabulary range on this tensor-parallel rank."""

    index: int
    vocab: range  # token IDs on this rank
    vocab_size: int  # base vocabulary over all ranks
    adds_new_rows: bool  # True if this rank stores the rows of added tokens


class _TargetFlags(NamedTuple):
    """For each target module, flags that say which kinds of weights any adapter in the batch has."""

    low_rank: list[bool]
    vectors: list[bool]
    rows: list[bool]


@dataclass(frozen=True)
class LoraBatch(DerivedCache):
    """The adapter of each token in a batch, and the locations of all adapter weights.

    All tensors except `host_table` are on the device. Graphs are replayed with different adapters at the same
    addresses, so captured kernels must not depend on the host fields, which are empty during capture.
    """

    buffer: torch.Tensor  # [num_elements]
    table: torch.Tensor  # [num_adapters, num_targets, len(Field)]; adapter 0 is the base model, without weights
    scales: torch.Tensor  # [num_adapters, num_targets]
    features: torch.Tensor  # [num_targets, 2]: in_features, out_features
    adapter_indices: torch.Tensor  # [num_tokens] int32; tokens with the same adapter are contiguous
    # --- on the host ---
    host_table: torch.Tensor  # copy of `table`
    bounds: list[int]  # LoRA segment i is tokens bounds[i] to bounds[i + 1]
    adapters: list[int]  # adapter of each segment
    in_graph: bool = False  # True if the batch is captured in a graph, so host fields are empty
    expert: int = 0  # the expert whose factors are used, for targets with one pair of factors per expert
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def select_expert(self, expert: int, tokens: torch.Tensor) -> "LoraBatch":
        """Return the batch for one expert, with only the given tokens, in ascending order. Synchronizes with the
        device.
        """
        indices = self.adapter_indices[tokens]
        adapters, counts = torch.unique_consecutive(indices, return_counts=True)
        bounds = [0, *counts.cumsum(0).tolist()]
        selected = replace(
            self, adapter_indices=indices, bounds=bounds, adapters=adapters.tolist(), expert=expert, derived={}
        )
        selected.copy_derived_from(self)
        return selected

    def has_low_rank(self, targets: Sequence[LoraTarget]) -> bool:
        return any(self._target_flags.low_rank[target.index] for target in targets)

    def has_vectors(self, targets: Sequence[LoraTarget]) -> bool:
        return any(self._target_flags.vectors[target.index] for target in targets)

    def changes(self, targets: Sequence[LoraTarget]) -> bool:
        """Return True if any adapter in the batch has weights for these targets."""
        return self.has_low_rank(targets) or self.has_vectors(targets) or any(self.has_rows(t.index) for t in targets)

    def has_rows(self, index: int) -> bool:
        return self._target_flags.rows[index]

    @property
    def largest_ranks(self) -> list[int]:
        """Return the largest LoRA rank in the batch for each target module."""
        return self.cached("ranks", self._find_largest_ranks)

    @property
    def fits_graph(self) -> bool:
        """Return True if a prefill graph can be replayed with these adapters."""
        return len(self.adapters) <= GRAPH_SEGMENTS and max(self.largest_ranks, default=0) <= GRAPH_RANK

    def copy_derived_from(self, other: "LoraBatch") -> None:
        """Copy the derived adapter values from `other` if both batches use the same set of adapters."""
        if set(self.adapters) == set(other.adapters):
            self.derived.update(
                (key, other.derived[key]) for key in ("field_maxima", "target_flags", "ranks") if key in other.derived
            )

    @property
    def _field_maxima(self) -> npt.NDArray[np.int64]:
        """Return the maximum of each table field over the batch's adapters, `[num_targets, len(Field)]`."""
        return self.cached("field_maxima", lambda: self.host_table.numpy()[sorted({0, *self.adapters})].max(0))

    def _find_largest_ranks(self) -> list[int]:
        if self.in_graph:
            return [GRAPH_RANK] * self.table.shape[1]
        ranks: list[int] = self._field_maxima[:, Field.RANK].tolist()
        return ranks

    @property
    def _target_flags(self) -> _TargetFlags:
        return self.cached("target_flags", self._find_target_flags)

    def _find_target_flags(self) -> _TargetFlags:
        if self.in_graph:
            return _TargetFlags(*([True] * self.table.shape[1] for _ in range(3)))
        maxima = self._field_maxima
        low_rank = maxima[:, Field.RANK] > 0
        vectors = (maxima[:, Field.OUTPUT_SCALE] >= 0) | (maxima[:, Field.OUTPUT_BIAS] >= 0)
        rows = (maxima[:, Field.NUM_ROWS] > 0) | (maxima[:, Field.NUM_NEW_ROWS] > 0)
        return _TargetFlags(low_rank.tolist(), vectors.tolist(), rows.tolist())


class UnrecordableError(Exception):
    """The recorded model run called an operation that a graph cannot replay. The message names the operation."""


class RecordedGraph(Protocol):
    """A recorded model run that can be replayed. Its input tensors must keep their addresses."""

    output: torch.Tensor  # result of the last replay

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records runs of model layers as graphs. All graphs share memory for intermediate tensors."""

    def record(self, run: Callable[[], torch.Tensor], rows: int) -> RecordedGraph:
        """Record a run over `rows` rows without executing its kernels.

        Raise `UnrecordableError` if the run cannot be recorded. No other thread may use the ops during recording.
        """
        ...


SampleTokens = Callable[[SamplingBatch, SamplingInputs], SampledTokens]


class Ops(Protocol):
    """The kernel backend interface. Ops modify only caches and tensors named `out`, unless documented otherwise.

    Queries and attention outputs are `[num_tokens, num_heads, head_dim]`. Keys and values are
    `[num_tokens, num_kv_heads, head_dim]`. Logits are `[rows, vocabulary]` of any dtype.
    """

    # --- capabilities ---

    @property
    def name(self) -> str:
        """Return the name of the backend and its instruction set, for the log."""
        ...

    @property
    def records_graphs(self) -> bool:
        """Return True if graphs can replay a step. This requires that no kernel depends on host values."""
        ...

    @property
    def has_fast_bfloat16(self) -> bool:
        """Return True if bfloat16 is at least as fast as float32."""
        ...

    @property
    def max_lora_rank(self) -> int | None:
        """Return the largest supported LoRA rank for linear layers, or None if there is no limit."""
        ...

    @property
    def sample_tokens(self) -> SampleTokens | None:
        """Return a kernel that samples a whole batch with mixed parameters, or None if the backend has no
        such kernel.
        """
        ...

    def make_recorder(self, max_rows: int) -> "Recorder | None":
        """Return a recorder for steps of up to `max_rows` tokens.

        Return None if the device uses CUDA graphs or no graphs.
        """
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
        """Apply RoPE to queries and keys, store keys and values in the cache, and return the causal attention outputs.

        Each token attends to the cached tokens of its sequence and to the new tokens up to itself. With n / 2 angles,
        RoPE rotates the first n head dimensions: dimension i with dimension i + n / 2. Implementations may modify
        `q` and `k`.

        In multi-head latent attention, `v` is `k` and both cache tensors are the same. CPU and reference ops support
        this.
        """
        ...

    def attend_sequences(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        lengths: Sequence[int],
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Apply RoPE as `attend` does, and return the attention outputs of whole sequences, without a KV cache.

        Sequence i has `lengths[i]` tokens. Each token attends to its sequence's tokens within the window, and if
        `spec.is_causal` only up to itself.
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
        """Return the normalized `x + residual`, scaled and shifted by each token's adapter, and `x + residual`.

        `eps` is a float32 tensor with one element. A weight in the dtype of `x` multiplies the rounded result. A
        float32 weight multiplies before rounding.
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
        """Return the layer norm of each row, scaled and shifted by each token's adapter."""
        ...

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        """Return `x @ weight.T + bias`, with each token's adapter applied.

        An adapter adds the scaled `x @ A.T @ B`, then multiplies by its output scale and adds its output bias, if
        present. The targets are adjacent in the output and consecutive in the adapter table.
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
        """Return `activation(gate) * up`, where gate and up are the two halves of the `linear` result."""
        ...

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return `activation(x)`. The result of a row never depends on the other rows."""
        ...

    def route(self, logits: torch.Tensor, top_k: int, spec: RouterSpec, bias: torch.Tensor | None = None) -> Routing:
        """Choose `top_k` experts for each token from router logits `[num_tokens, num_experts]`.

        Scores and weights are computed in float32. The experts with the largest sums of score and `bias`,
        `[num_experts]` float32, are chosen. The weights are the scores without the bias. Among experts with equal sums,
        any can be chosen, but the choice depends only on the token's logits.
        """
        ...

    def run_experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: ExpertWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, with the token's adapter applied.

        An expert computes `down(activation(gate) * up)`. The outputs are summed in float32, in an order that depends
        only on the token's experts. The targets are gate, up and down, which are consecutive in the adapter table. Only
        their low-rank factors apply.
        """
        ...

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Add the scaled `x @ A.T @ B` of each token's adapter to `out`."""
        ...

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Multiply each row of `out`, in place, by its adapter's output scale and add the adapter's output bias."""
        ...

    def look_up_rows(self, weight: torch.Tensor | StoredMatrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows for `ids`, `[*ids, size]`.

        IDs outside the matrix are an error. A CPU raises `IndexError`; a GPU reports the error asynchronously.
        """
        ...

    def adapt_embedding(self, out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
        """Apply each token's adapter, in place, to the base embedding rows for `ids`.

        The order is: adapter-specific rows replace base rows, LoRA is added, output scale and output bias are
        applied, and rows of added tokens replace the result. Rows for tokens on other ranks stay zero.
        """
        ...

    def keeps_quantized(self, matrix: QuantizedMatrix) -> bool:
        """Return False if a quantized matrix must be converted to a tensor when it is loaded."""
        ...

    def make_linear(self, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> LinearWeights:
        """Return a matrix `[out, in]` and its bias in the layout that these kernels use.

        A quantized matrix stays quantized. Kernels that do not support its format use `read` for each product.
        """
        ...

    def make_experts(self, count: int, matrices: Iterable[ExpertMatrices], activation: Activation) -> ExpertWeights:
        """Return the matrices of `count` experts in the layout that these kernels use.

        `matrices` is consumed one expert at a time, so that only one expert is in memory twice.
        """
        ...

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:
        """Compile the kernels for these linear layers before the first request."""
        ...

    def refresh_lora_plan(self, lora: LoraBatch, current: LoraBatch) -> None:
        """Recompute the LoRA plan of a captured graph in place.

        `lora` is the graph's padded batch; `current` is the batch to replay.
        """
        ...

    # --- sampling ---

    def choose_greedy(
        self, logits: torch.Tensor, token_masks: torch.Tensor | None = None, mask_indices: torch.Tensor | None = None, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely token of each row, [rows], and its log probability, [rows] float32.

        If several tokens are equally likely, the lowest token ID is returned. `token_masks`, [masks, words] int32, have
        one bit per token, set if the token is allowed. `mask_indices`, [rows] int64, is the mask index of each row;
        negative means no mask.
        """
        ...

    def gather_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        token_masks: torch.Tensor | None = None,
        mask_indices: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """Return the log probabilities, [rows, count] float32, of `token_ids`, [rows, count].

        If `temperatures`, [rows], are given, logits are divided by them. With masks, the tokens must be allowed.
        """
        ...

    def top_k_scores(
        self,
        logits: torch.Tensor,
        count: int,
        token_masks: torch.Tensor | None = None,
        mask_indices: torch.Tensor | None = None,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `count` highest scores, [rows, count] float32, in descending order, and their token IDs.

        NaN sorts first. If a mask allows fewer tokens, the remaining scores are -infinity with arbitrary token IDs.
        """
        ...
