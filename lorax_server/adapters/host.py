"""Converts an adapter to the device layout for one rank, so that loading it to the device is a single copy.

Adapters of all PEFT methods are converted to four fields per module: low-rank factors (LoRA, VeRA, KaSA, replaced
linear weights), an output scale (DoRA, IA3, norm weights), an output bias (all biases), and replaced rows (embedding
and head).
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lorax_server.adapters.methods.matrices import compute_smallest_components, compute_weight_difference
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.tensor_reader import is_finite
from lorax_server.adapters.weights import AdapterWeights, ModuleWeights
from lorax_server.distributed import ProcessGroup, Shard
from lorax_server.errors import AdapterError
from lorax_server.kernels import NUM_OFFSETS, Field, StoredMatrix

UNIT_BYTES = 256
COPY_BLOCK_ELEMENTS = 16384  # transposed matrices are copied in blocks that fit into the L1 cache
NORM_BLOCK_ROWS = 1024  # rows cast to float32 at a time to compute DoRA norms


@dataclass(frozen=True)
class HostAdapter:
    """An adapter shard for one rank in host memory. Offsets are relative to the start of `buffer`."""

    buffer: torch.Tensor  # [num_elements], padded to a multiple of `UNIT_BYTES`
    table: torch.Tensor  # [num_targets, len(Field)]
    scales: torch.Tensor  # [num_targets]
    vocab_size: int
    units: int  # size in `UNIT_BYTES`; the maximum over all ranks, because they use the same arena address
    changes_kv: bool = True  # keys and values depend on the adapter


def empty_table(num_targets: int) -> torch.Tensor:
    """Return the adapter table of the base model, which has no adapter weights."""
    table = torch.zeros(num_targets, len(Field), dtype=torch.long)
    table[:, :NUM_OFFSETS] = -1
    return table


def check_ranks(adapter: AdapterWeights, targets: Mapping[str, AdapterTarget], max_rank: int | None) -> None:
    """Raise AdapterError if the kernels do not support an adapter's rank. This does not read its tensors.

    The limit applies to linear layers and LM heads, but not to embeddings.
    """
    if max_rank is None:
        return
    for module in adapter.modules:
        rank = adapter.find_rank(module)
        if rank > max_rank and targets[module].kind is not TargetKind.EMBEDDING:
            raise AdapterError(
                f"adapter {adapter.name!r}: module {module!r} has rank {rank}, but the kernels for this device "
                f"support at most {max_rank}. KaSA doubles the rank; a replaced linear weight has full rank"
            )


def prepare(
    adapter: AdapterWeights,
    targets: Mapping[str, AdapterTarget],
    dtype: torch.dtype,
    group: ProcessGroup,
    pause: Callable[[], object] = lambda: None,
    after_kv: Collection[str] = (),
) -> HostAdapter:
    """Return an adapter in this rank's device layout. All ranks must call this together, and they agree on the size and
    on errors.

    `after_kv` contains the targets that do not affect any keys and values.

    `pause` is called about every millisecond and may block, so that decode steps take priority. Large modules, VeRA's
    random matrices and KaSA's decompositions (up to 30 seconds) run without a pause.
    """
    # Python lists, because writing single tensor elements would dominate the run time.
    table, scales = empty_table(len(targets)).tolist(), [0.0] * len(targets)
    modules = set(adapter.modules)
    indices = {name: index for index, name in enumerate(targets)}
    layout, failure = _BufferLayout(UNIT_BYTES // dtype.itemsize), None
    for index, target in enumerate(targets.values()):
        if target.name not in modules:
            continue
        pause()
        weights, module = adapter.load(target.name), None
        try:
            module = _PreparedModule(adapter.name, target, weights, dtype, group, pause)
            scales[index] = module.scale
            for field, number in module.count_fields().items():
                table[index][field] = number
            for field, tensor in module.cast_tensors().items():
                table[index][field] = layout.add(tensor)
            if weights.shared_a is not None:
                table[index][Field.A] = table[indices[weights.shared_a]][Field.A]
        except AdapterError as error:  # raised later, because other ranks wait for this rank at the next module
            failure = failure or error
        del weights, module  # free the float32 copies before the next module is loaded
    # Fill the buffer before the ranks agree, so that every rank has the adapter after the agreement.
    buffer = layout.fill(dtype, pause)
    device = next((target.weight.device for target in targets.values() if target.weight is not None), None)
    fields = torch.tensor(table, dtype=torch.long).view(-1, len(Field))
    is_changed = (fields != empty_table(len(targets))).any(1).tolist()
    changes_kv = any(name not in after_kv for name in itertools.compress(targets, is_changed))
    units, is_rejected, changes_kv = _combine_across_ranks(
        (-(-buffer.numel() // layout.unit), failure is not None, changes_kv), group, device
    )
    if is_rejected:
        raise failure or AdapterError(f"adapter {adapter.name!r}: another tensor-parallel rank rejected it")
    return HostAdapter(buffer, fields, torch.tensor(scales), adapter.vocab_size, units, changes_kv)


class _BufferLayout:
    """Collects tensors and copies them to one buffer, where each tensor starts at a multiple of `UNIT_BYTES`."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.end = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Append a tensor and return its offset in the buffer, or -1 if the tensor is empty."""
        if tensor.numel() == 0:
            return -1
        offset = self.end
        self.tensors.append((offset, tensor))
        self.end += -(-tensor.numel() // self.unit) * self.unit
        return offset

    def fill(self, dtype: torch.dtype, pause: Callable[[], object]) -> torch.Tensor:
        buffer, stop = torch.empty(max(self.end, self.unit), dtype=dtype), max(self.end, self.unit)
        while self.tensors:  # each is freed once it is copied
            pause()
            offset, tensor = self.tensors.pop()
            end = offset + tensor.numel()
            copy_tensor(tensor, buffer[offset:end].view(tensor.shape))
            if end < stop:
                buffer[end:stop] = 0
            stop = offset
        buffer[:stop] = 0
        return buffer


def copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor on the current thread only, so that the other cores stay free for decode steps.

    Transposed tensors are copied in blocks, which is several times faster.
    """
    bits = torch.int16 if source.itemsize == torch.int16.itemsize else torch.int32
    old, new = source.view(bits).numpy(), target.view(bits).numpy()
    count = source.numel()
    if source.dim() == 2 and not source.is_contiguous():
        count = max(1, COPY_BLOCK_ELEMENTS // len(source))
    for start in range(0, source.shape[-1], count):
        new[..., start : start + count] = old[..., start : start + count]


def _combine_across_ranks(
    values: tuple[int, bool, bool], group: ProcessGroup, device: torch.device | None
) -> tuple[int, bool, bool]:
    """Return the maximum of each value over all ranks: memory units, and the flags `is_rejected` and `changes_kv`."""
    if group.size() == 1:
        return values
    gathered = group.all_gather(torch.tensor([[int(value) for value in values]], device=device), dim=0)
    units, is_rejected, changes_kv = gathered.amax(0).tolist()
    return units, bool(is_rejected), bool(changes_kv)


class _PreparedModule:
    """The adapter table fields for one module on one rank. They are computed in float32 and cast at the end."""

    def __init__(
        self,
        name: str,
        target: AdapterTarget,
        weights: ModuleWeights,
        dtype: torch.dtype,
        group: ProcessGroup,
        pause: Callable[[], object],
    ) -> None:
        self.name = name
        self.target = target
        self.weights = weights
        self.dtype = dtype
        self.group = group
        self.pause = pause
        size = target.outputs.full if target.kind is TargetKind.EMBEDDING else target.inputs.full
        self.row_ids = torch.empty(0, dtype=torch.long)
        self.rows = self.new_rows = torch.empty(0, size)
        if target.kind in (TargetKind.EMBEDDING, TargetKind.HEAD):
            self._find_changed_rows()
        elif target.kind is TargetKind.CLASSIFIER:  # all rows are stored, because adapters differ in their labels
            self.new_rows = weights.weight if weights.weight is not None else target.read().float().cpu()
        self.scale = weights.scale
        self.lora_a, self.lora_b = self._shard_factors()
        self.output_scale = self._compute_output_scale()
        self.output_bias = self._compute_output_bias()
        if weights.output_scale is not None:  # IA3 also scales the bias
            scale = target.outputs.select(weights.output_scale, dim=0)
            self.output_scale = scale if self.output_scale is None else self.output_scale * scale
            self.output_bias = None if self.output_bias is None else self.output_bias * scale
        self._complete_new_rows()

    def count_fields(self) -> dict[Field, int]:
        rank = 0 if self.lora_b is None or self.target.outputs.size == 0 else self.lora_b.shape[-2]
        return {Field.RANK: rank, Field.NUM_ROWS: len(self.rows), Field.NUM_NEW_ROWS: len(self.new_rows)}

    def cast_tensors(self) -> dict[Field, torch.Tensor]:
        tensors = {
            Field.A: self._reorder_inputs(self.lora_a) if self.weights.shared_a is None else None,
            Field.B: self.lora_b,
            Field.OUTPUT_SCALE: self.output_scale,
            Field.OUTPUT_BIAS: self.output_bias,
            Field.ROWS: self.rows,
            Field.NEW_ROWS: self.new_rows,
        }
        cast = {field: tensor.to("cpu", self.dtype) for field, tensor in tensors.items() if tensor is not None}
        # Half precision tensors that were not cast have been checked already, when the file was read.
        changed = [new for field, new in cast.items() if new is not tensors[field] or new.dtype == torch.float32]
        if not all(map(is_finite, changed)):
            raise self._error(f"has values that overflow {self.dtype}")
        # Row IDs are stored as raw bits: two float16 elements hold one int32.
        return cast | {Field.ROW_IDS: self.row_ids.int().view(self.dtype)}

    def _reorder_inputs(self, lora_a: torch.Tensor | None) -> torch.Tensor | None:
        order = self.target.input_order
        return lora_a if lora_a is None or order is None else lora_a.index_select(-1, order.to(lora_a.device))

    def _error(self, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: module {self.target.name!r} {reason}")

    @property
    def _base_weight(self) -> torch.Tensor | StoredMatrix:
        assert self.target.weight is not None
        return self.target.weight

    @property
    def _vocab_shard(self) -> Shard:
        return self.target.inputs if self.target.kind is TargetKind.EMBEDDING else self.target.outputs

    def _find_changed_rows(self) -> None:
        """Set `row_ids` and `rows` (rows that differ from the base model), and `new_rows` (rows of added tokens)."""
        (start, stop), vocab_size = self._vocab_shard.ranges[0], self._vocab_shard.full
        weight, token_rows = self.weights.weight, self.weights.token_rows
        if weight is not None:
            local = weight[start:stop]
            self.row_ids = self._find_differences(local)
            self.rows, self.new_rows = local[self.row_ids], weight[vocab_size:]
        if token_rows is not None:
            ids = torch.tensor(self.weights.token_ids, dtype=torch.long)
            grown = max(int(ids.max()) + 1 - vocab_size - len(self.new_rows), 0) if len(ids) else 0
            self.new_rows = F.pad(self.new_rows, (0, 0, 0, grown))
            self.new_rows[ids[ids >= vocab_size] - vocab_size] = token_rows[ids >= vocab_size]
            is_local = (ids >= start) & (ids < stop)
            is_unchanged = ~torch.isin(self.row_ids, ids[is_local] - start)
            row_ids = torch.cat([self.row_ids[is_unchanged], ids[is_local] - start])
            rows = torch.cat([self.rows[is_unchanged], token_rows[is_local]])
            order = row_ids.argsort()
            self.row_ids, self.rows = row_ids[order], rows[order]

    def _find_differences(self, local: torch.Tensor) -> torch.Tensor:
        """Return the indices of rows that differ from the base model. A quantized base weight is read in blocks."""
        found = [torch.empty(0, dtype=torch.long)]
        for start in range(0, len(local), NORM_BLOCK_ROWS):
            rows = slice(start, min(start + NORM_BLOCK_ROWS, len(local)))
            base = self.target.read(rows).cpu()
            found.append((local[rows].to(self.dtype) != base).any(1).nonzero().flatten() + start)
        return torch.cat(found)

    def _shard_factors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        lora_a, lora_b, weight = self.weights.lora_a, self.weights.lora_b, self.weights.weight
        if self.target.kind is TargetKind.LINEAR and weight is not None:
            self.scale = 1.0
            return compute_weight_difference(self.target, weight, self.pause)
        if lora_a is None or lora_b is None or self.target.kind is TargetKind.CLASSIFIER:
            return None, None
        if self.weights.diagonal is not None:
            return self._shard_kasa_factors(lora_a, lora_b * (self.scale * self.weights.diagonal))
        if self.target.kind is TargetKind.EMBEDDING:
            lora_a = _resize_rows(lora_a.t(), self._vocab_shard.full).t()
        elif self.target.kind is TargetKind.HEAD:
            lora_b = _resize_rows(lora_b, self._vocab_shard.full)
        return self.target.shard_factors(lora_a, lora_b)

    def _shard_kasa_factors(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return LoRA factors for KaSA that also subtract the smallest singular components of the base model matrix.

        Also set `scale` to 1, because the factors include the scale.
        """
        self.scale, outputs = 1.0, self.target.outputs
        sizes = torch.tensor([outputs.size], device=self._base_weight.device)
        if outputs.size != outputs.full and int(self.group.all_reduce(sizes)) != outputs.full:
            raise self._error("uses KaSA, which is not supported if tensor-parallel ranks replicate part of the matrix")
        local_a, local_b = self.target.shard_factors(lora_a, lora_b)
        dropped_a, dropped_b = compute_smallest_components(self.target, len(lora_a), self.group, self.pause)
        return torch.cat([local_a.float(), dropped_a]), torch.cat([local_b, -dropped_b])

    def _compute_output_scale(self) -> torch.Tensor | None:
        target, magnitude = self.target, self.weights.magnitude
        if target.kind is TargetKind.NORM and self.weights.weight is not None:
            base, new = target.read().float().cpu(), target.outputs.select(self.weights.weight, dim=0)
            return self._divide(new + target.offset, base, "base model's norm weight")
        if magnitude is None or target.kind is TargetKind.CLASSIFIER:  # included in the rows
            return None
        if target.kind is TargetKind.HEAD:
            magnitude = _resize_rows(magnitude, target.outputs.full)
        squares = self._squared_norms()
        if not target.inputs.is_whole:
            squares = self.group.all_reduce(squares)
        return self._divide(target.outputs.select(magnitude, dim=0), squares.sqrt().cpu(), "norm of the adapted matrix")

    def _divide(self, numerator: torch.Tensor, denominator: torch.Tensor, label: str) -> torch.Tensor:
        if bool((denominator == 0).any()):
            raise self._error(f"cannot be served: the {label} contains zeros")
        return numerator / denominator

    def _squared_norms(self) -> torch.Tensor:
        """Return the squared norm of each row (output) of the adapted matrix, summed over this rank's inputs."""
        assert self.lora_a is not None
        assert self.lora_b is not None
        base, scale = self._base_weight, self.weights.scale
        lora_a, lora_b = (factor.to(base.device, torch.float32) for factor in (self.lora_a, self.lora_b))
        is_embedding = self.target.kind is TargetKind.EMBEDDING
        squares = [torch.zeros(base.shape[1] if is_embedding else 0, device=base.device)]
        for start in range(0, self._num_rows(), NORM_BLOCK_ROWS):
            self.pause()
            rows = slice(start, min(start + NORM_BLOCK_ROWS, self._num_rows()))
            left, right = (lora_a[rows], lora_b) if is_embedding else (lora_b.t()[rows], lora_a)
            # In place, to save memory and bandwidth for decode steps that run concurrently on the GPU.
            matrix = self._replaced_rows(rows).addmm_(left, right, alpha=scale)
            squares.append(torch.linalg.vector_norm(matrix, dim=0 if is_embedding else 1).square())
        if not is_embedding:
            return torch.cat(squares)
        if self.target.adds_bias:
            squares.append(self._adapted_new_rows().square().sum(0).to(base.device))
        return torch.stack(squares).sum(0)

    def _num_rows(self) -> int:
        """Return the number of rows on this rank, which is smaller than in the base model if the adapter has a smaller
        vocabulary.
        """
        if self.target.kind is not TargetKind.EMBEDDING or self.weights.weight is None:
            return len(self._base_weight)
        return min(len(self._base_weight), max(0, len(self.weights.weight) - self._vocab_shard.ranges[0][0]))

    def _replaced_rows(self, rows: slice) -> torch.Tensor:
        """Return base model rows in float32, with the adapter's rows in place of the rows that it replaces."""
        matrix = self.target.read(rows).to(torch.float32, copy=True)
        is_local = (self.row_ids >= rows.start) & (self.row_ids < rows.stop)
        if bool(is_local.any()):
            matrix[self.row_ids[is_local].to(matrix.device) - rows.start] = self.rows[is_local].to(matrix.device)
        return matrix

    def _adapted_new_rows(self) -> torch.Tensor:
        lora_a, lora_b, count = self.weights.lora_a, self.weights.lora_b, len(self.new_rows)
        if lora_a is None or lora_b is None or count == 0:
            return self.new_rows
        if self.target.kind is TargetKind.EMBEDDING:
            return self.new_rows + self.weights.scale * (lora_a[:, -count:].float().t() @ lora_b.float().t())
        return self.new_rows + self.weights.scale * (lora_b[-count:].float() @ lora_a.float())

    def _complete_new_rows(self) -> None:
        """Apply the LoRA factors and the DoRA magnitude to the rows of added tokens, which have no row in the base
        model.
        """
        rows, magnitude = self._adapted_new_rows(), self.weights.magnitude
        if magnitude is not None and len(rows):
            if self.target.kind is TargetKind.EMBEDDING:
                assert self.output_scale is not None
                rows = rows * self.output_scale
            else:
                rows = rows * self._divide(magnitude[-len(rows) :], rows.norm(dim=1), "norm of an added row")[:, None]
        self.new_rows = rows

    def _compute_output_bias(self) -> torch.Tensor | None:
        """Return the vector that is added to the module output after multiplication by the output scale, or None."""
        target, weights = self.target, self.weights
        if not target.adds_bias:
            return None
        old = None if target.bias is None else target.bias.float().cpu()
        output_bias = None
        if target.kind is TargetKind.CLASSIFIER:
            bias = old if weights.bias is None else weights.bias
            added = None if weights.lora_bias is None else weights.lora_bias * weights.scale
            return bias if added is None else added if bias is None else bias + added
        if old is not None and (weights.bias is not None or self.output_scale is not None):
            new = old if weights.bias is None else target.outputs.select(self._resize_bias(weights.bias), dim=0)
            output_bias = new - old * (1 if self.output_scale is None else self.output_scale)
        if weights.lora_bias is not None:
            added = target.outputs.select(weights.lora_bias, dim=0) * weights.scale
            output_bias = added if output_bias is None else output_bias + added
        return output_bias

    def _resize_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the adapter's bias, resized to the base model's outputs. The bias of added tokens must be zero."""
        size = self.target.outputs.full
        if bool((bias[size:] != 0).any()):
            raise self._error("has a nonzero bias for added tokens, which is not supported")
        return _resize_rows(bias, size)


def _resize_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the matrix truncated or zero-padded to `size` rows."""
    missing = size - len(x)
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (missing,)) if missing > 0 else x[:size]
