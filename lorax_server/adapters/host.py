"""An adapter prepared for one rank: cut, in the model's dtype and the device's layout, so that loading it is a copy.

Everything PEFT can train becomes four fields at a module: low-rank factors, a factor and a shift of the output, and
rows for some tokens. DoRA is a factor: its magnitude over the norm of the adapted matrix, which is fixed once both are
known. A bias is a shift, a norm's weight is a factor, and a full head or embedding is the rows that differ from the
base model's. IA3 is a factor, VeRA is low-rank factors, and so are the difference to a full matrix of a linear, and the
singular values that KaSA takes out of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lorax_server.adapters.methods.matrices import find_difference, find_smallest
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.adapters.tensor_reader import is_finite
from lorax_server.adapters.weights import AdapterWeights, ModuleWeights
from lorax_server.distributed import ProcessGroup, Shard
from lorax_server.errors import AdapterError
from lorax_server.kernels import NUM_OFFSETS, Field, PanelMatrix

UNIT_BYTES = 256
COPIED_NUMBERS = 16384  # of a transposed matrix at a time: they fit into the nearest cache
NORM_ROWS = 1024  # rows of a matrix that are cast to float32 at a time when norms are computed


@dataclass(frozen=True)
class HostAdapter:
    """One rank's part of an adapter. Offsets are relative to its first element."""

    buffer: torch.Tensor  # [num_elements], a whole number of units
    table: torch.Tensor  # [num_targets, len(Field)]
    scales: torch.Tensor  # [num_targets]
    vocab_size: int
    units: int  # the same on all ranks, since it has the same address on all; some ranks may leave a few unused


def empty_table(num_targets: int) -> torch.Tensor:
    """Return the fields of an adapter without weights, as the base model is."""
    table = torch.zeros(num_targets, len(Field), dtype=torch.long)
    table[:, :NUM_OFFSETS] = -1
    return table


def check_ranks(adapter: AdapterWeights, targets: Mapping[str, AdapterTarget], max_rank: int | None) -> None:
    """Refuse an adapter that kernels do not serve, before anything of it is read or drawn.

    They may serve LoRA up to `max_rank` at linears and heads; embeddings have no such limit.
    """
    if max_rank is None:
        return
    for module in adapter.modules:
        rank = adapter.find_rank(module)
        if rank > max_rank and targets[module].kind is not Kind.EMBEDDING:
            raise AdapterError(
                f"adapter {adapter.name!r}: module {module!r} has rank {rank}, and the kernels of this device serve up "
                f"to {max_rank}; KaSA has twice its r, and a linear that is replaced as a whole its smaller side"
            )


def prepare(
    adapter: AdapterWeights,
    targets: Mapping[str, AdapterTarget],
    dtype: torch.dtype,
    group: ProcessGroup,
    pause: Callable[[], object] = lambda: None,
) -> HostAdapter:
    """Prepare an adapter. All ranks do it together: the norms of DoRA are summed, and all refuse what one refuses.

    `pause` is called between pieces of work, and may wait. Most of them take about a millisecond. A large module, the
    random matrices of VeRA and each matrix that KaSA decomposes take longer, the last up to half a minute in one call.
    """
    # Python numbers: to write them into a tensor one by one takes longer than all the rest.
    table, scales = empty_table(len(targets)).tolist(), [0.0] * len(targets)
    modules = set(adapter.modules)
    layout, refusal = _BufferLayout(UNIT_BYTES // dtype.itemsize), None
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
        except AdapterError as error:  # continue: other ranks may accept this module and wait in the next
            refusal = refusal or error
        del weights, module  # before the next is loaded: they are in float32
    buffer = layout.fill(dtype, pause)  # before ranks agree: when one rank has the answer, all have the adapter
    device = next((target.weight.device for target in targets.values() if target.weight is not None), None)
    units, refused = _agree(-(-buffer.numel() // layout.unit), refusal is not None, group, device)
    if refused:
        raise refusal or AdapterError(f"adapter {adapter.name!r}: another tensor-parallel rank refuses it")
    fields = torch.tensor(table, dtype=torch.long).view(-1, len(Field))
    return HostAdapter(buffer, fields, torch.tensor(scales), adapter.vocab_size, units)


class _BufferLayout:
    """Tensors one after the other, each from the beginning of a unit."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.end = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Append a tensor. Return its offset, -1 if it is empty."""
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
            _copy(tensor, buffer[offset:end].view(tensor.shape))
            if end < stop:
                buffer[end:stop] = 0
            stop = offset
        buffer[:stop] = 0
        return buffer


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of the same dtype on this thread alone: others have steps to run. Transposed ones, half of an
    adapter, go a few rows at a time: several times faster than all at once."""
    bits = torch.int16 if source.itemsize == torch.int16.itemsize else torch.int32
    old, new = source.view(bits).numpy(), target.view(bits).numpy()
    count = source.numel()
    if source.dim() == 2 and not source.is_contiguous():
        count = max(1, COPIED_NUMBERS // len(source))
    for start in range(0, source.shape[-1], count):
        new[..., start : start + count] = old[..., start : start + count]


def _agree(units: int, refused: bool, group: ProcessGroup, device: torch.device | None) -> tuple[int, bool]:
    """Return the most units that any rank needs, and whether any rank refuses."""
    if group.size() == 1:
        return units, refused
    answers = group.all_gather(torch.tensor([[units, int(refused)]], device=device), dim=0)
    return int(answers[:, 0].max()), bool(answers[:, 1].any())


class _PreparedModule:
    """One adapter at one module, on one rank. Computed in float32, cast at the end."""

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
        size = target.outputs.full if target.kind is Kind.EMBEDDING else target.inputs.full
        self.row_ids = torch.empty(0, dtype=torch.long)
        self.rows = self.new_rows = torch.empty(0, size)
        if target.kind in (Kind.EMBEDDING, Kind.HEAD):
            self._find_rows()
        self.scale = weights.scale
        self.lora_a, self.lora_b = self._cut_factors()
        self.factor = self._find_factor()
        self.shift = self._find_shift()
        if weights.output_scale is not None:  # of all that the module returns, its bias too
            scale = target.outputs.take(weights.output_scale, dim=0)
            self.factor = scale if self.factor is None else self.factor * scale
            self.shift = None if self.shift is None else self.shift * scale
        self._complete_new_rows()

    def count_fields(self) -> dict[Field, int]:
        rank = 0 if self.lora_b is None or self.target.outputs.size == 0 else self.lora_b.shape[0]
        return {Field.RANK: rank, Field.NUM_ROWS: len(self.rows), Field.NUM_NEW_ROWS: len(self.new_rows)}

    def cast_tensors(self) -> dict[Field, torch.Tensor]:
        tensors = {
            Field.A: self.lora_a,
            Field.B: self.lora_b,
            Field.FACTOR: self.factor,
            Field.SHIFT: self.shift,
            Field.ROWS: self.rows,
            Field.NEW_ROWS: self.new_rows,
        }
        cast = {field: tensor.to("cpu", self.dtype) for field, tensor in tensors.items() if tensor is not None}
        # All that is computed is in float32 first: what stays as it is in half precision is finite, as in the file.
        changed = [new for field, new in cast.items() if new is not tensors[field] or new.dtype == torch.float32]
        if not all(map(is_finite, changed)):
            raise self._refuse(f"has numbers that {self.dtype} cannot hold")
        # Ids are carried bit by bit: two float16 hold one int32.
        return cast | {Field.ROW_IDS: self.row_ids.int().view(self.dtype)}

    def _refuse(self, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: module {self.target.name!r} {reason}")

    @property
    def _base(self) -> torch.Tensor | PanelMatrix:
        assert self.target.weight is not None
        return self.target.weight

    @property
    def _vocabulary(self) -> Shard:
        return self.target.inputs if self.target.kind is Kind.EMBEDDING else self.target.outputs

    def _find_rows(self) -> None:
        """Find the rows that differ from the base model's, and the rows of added tokens."""
        (start, stop), vocab_size = self._vocabulary.ranges[0], self._vocabulary.full
        weight, token_rows = self.weights.weight, self.weights.token_rows
        if weight is not None:
            local = weight[start:stop]
            base = self.target.read(slice(len(local))).cpu()
            self.row_ids = (local.to(self.dtype) != base).any(1).nonzero().flatten()
            self.rows, self.new_rows = local[self.row_ids], weight[vocab_size:]
        if token_rows is not None:
            ids = torch.tensor(self.weights.token_ids, dtype=torch.long)
            grown = max(int(ids.max()) + 1 - vocab_size - len(self.new_rows), 0) if len(ids) else 0
            self.new_rows = F.pad(self.new_rows, (0, 0, 0, grown))
            self.new_rows[ids[ids >= vocab_size] - vocab_size] = token_rows[ids >= vocab_size]
            mine = (ids >= start) & (ids < stop)
            kept = ~torch.isin(self.row_ids, ids[mine] - start)
            row_ids = torch.cat([self.row_ids[kept], ids[mine] - start])
            rows = torch.cat([self.rows[kept], token_rows[mine]])
            order = row_ids.argsort()
            self.row_ids, self.rows = row_ids[order], rows[order]

    def _cut_factors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        lora_a, lora_b, weight = self.weights.lora_a, self.weights.lora_b, self.weights.weight
        if self.target.kind is Kind.LINEAR and weight is not None:
            self.scale = 1.0
            return find_difference(self.target, weight, self.pause)
        if lora_a is None or lora_b is None:
            return None, None
        if self.weights.diagonal is not None:
            return self._cut_kasa(lora_a, lora_b * (self.scale * self.weights.diagonal))
        if self.target.kind is Kind.EMBEDDING:
            lora_a = _resized(lora_a.t(), self._vocabulary.full).t()
        elif self.target.kind is Kind.HEAD:
            lora_b = _resized(lora_b, self._vocabulary.full)
        return self.target.cut(lora_a, lora_b)

    def _cut_kasa(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors, and beside them what takes the smallest singular values out of the base's matrix."""
        self.scale, outputs = 1.0, self.target.outputs
        sizes = torch.tensor([outputs.size], device=self._base.device)
        if outputs.size != outputs.full and int(self.group.all_reduce(sizes)) != outputs.full:
            raise self._refuse("is of KaSA, which is not supported where ranks share a part of its matrix")
        local_a, local_b = self.target.cut(lora_a, lora_b)
        dropped_a, dropped_b = find_smallest(self.target, len(lora_a), self.group, self.pause)
        return torch.cat([local_a.float(), dropped_a]), torch.cat([local_b, -dropped_b])

    def _find_factor(self) -> torch.Tensor | None:
        target, magnitude = self.target, self.weights.magnitude
        if target.kind is Kind.NORM and self.weights.weight is not None:
            base, new = target.read().float().cpu(), target.outputs.take(self.weights.weight, dim=0)
            return self._ratio(new + target.offset, base, "weight of the base model's norm")
        if magnitude is None:
            return None
        if target.kind is Kind.HEAD:
            magnitude = _resized(magnitude, target.outputs.full)
        squares = self._squares()
        if not target.inputs.is_whole:
            squares = self.group.all_reduce(squares)
        return self._ratio(target.outputs.take(magnitude, dim=0), squares.sqrt().cpu(), "norm of the adapted matrix")

    def _ratio(self, above: torch.Tensor, below: torch.Tensor, what: str) -> torch.Tensor:
        if bool((below == 0).any()):
            raise self._refuse(f"cannot be served: the {what} has zeros")
        return above / below

    def _squares(self) -> torch.Tensor:
        """Return the squared norm of each output of the adapted matrix, over this rank's inputs."""
        assert self.lora_a is not None
        assert self.lora_b is not None
        base, scale = self._base, self.weights.scale
        lora_a, lora_b = (factor.to(base.device, torch.float32) for factor in (self.lora_a, self.lora_b))
        is_embedding = self.target.kind is Kind.EMBEDDING
        squares = [torch.zeros(base.shape[1] if is_embedding else 0, device=base.device)]
        for start in range(0, self._num_rows(), NORM_ROWS):
            self.pause()
            rows = slice(start, min(start + NORM_ROWS, self._num_rows()))
            left, right = (lora_a[rows], lora_b) if is_embedding else (lora_b.t()[rows], lora_a)
            # In place: on a GPU, steps run beside this, and it should take little of the memory and of its bandwidth.
            matrix = self._replaced_rows(rows).addmm_(left, right, alpha=scale)
            squares.append(torch.linalg.vector_norm(matrix, dim=0 if is_embedding else 1).square())
        if not is_embedding:
            return torch.cat(squares)
        if self.target.adds_once:
            squares.append(self._adapted_new_rows().square().sum(0).to(base.device))
        return torch.stack(squares).sum(0)

    def _num_rows(self) -> int:
        """Count the rows of this rank's matrix that the adapter has: its vocabulary may be smaller."""
        if self.target.kind is not Kind.EMBEDDING or self.weights.weight is None:
            return len(self._base)
        return min(len(self._base), max(0, len(self.weights.weight) - self._vocabulary.ranges[0][0]))

    def _replaced_rows(self, rows: slice) -> torch.Tensor:
        """Return rows of the base model's matrix in float32, with the adapter's in their place."""
        matrix = self.target.read(rows).to(torch.float32, copy=True)
        mine = (self.row_ids >= rows.start) & (self.row_ids < rows.stop)
        if bool(mine.any()):
            matrix[self.row_ids[mine].to(matrix.device) - rows.start] = self.rows[mine].to(matrix.device)
        return matrix

    def _adapted_new_rows(self) -> torch.Tensor:
        lora_a, lora_b, count = self.weights.lora_a, self.weights.lora_b, len(self.new_rows)
        if lora_a is None or lora_b is None or count == 0:
            return self.new_rows
        if self.target.kind is Kind.EMBEDDING:
            return self.new_rows + self.weights.scale * (lora_a[:, -count:].float().t() @ lora_b.float().t())
        return self.new_rows + self.weights.scale * (lora_b[-count:].float() @ lora_a.float())

    def _complete_new_rows(self) -> None:
        """Add factors and magnitude to the rows of added tokens, since the base model has no row for these."""
        rows, magnitude = self._adapted_new_rows(), self.weights.magnitude
        if magnitude is not None and len(rows):
            if self.target.kind is Kind.EMBEDDING:
                assert self.factor is not None
                rows = rows * self.factor
            else:
                rows = rows * self._ratio(magnitude[-len(rows) :], rows.norm(dim=1), "norm of an added row")[:, None]
        self.new_rows = rows

    def _find_shift(self) -> torch.Tensor | None:
        """Return the vector that is added to the base model's output, after the factor, to get the adapter's."""
        target, weights = self.target, self.weights
        if not target.adds_once:
            return None
        old = None if target.bias is None else target.bias.float().cpu()
        shift = None
        if old is not None and (weights.bias is not None or self.factor is not None):
            new = old if weights.bias is None else target.outputs.take(self._find_bias(weights.bias), dim=0)
            shift = new - old * (1 if self.factor is None else self.factor)
        if weights.lora_bias is not None:
            added = target.outputs.take(weights.lora_bias, dim=0) * weights.scale
            shift = added if shift is None else shift + added
        return shift

    def _find_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the adapter's bias of the base model's outputs. Added tokens have no place for one of their own."""
        size = self.target.outputs.full
        if bool((bias[size:] != 0).any()):
            raise self._refuse("has a bias for added tokens, which is not supported unless it is zero")
        return _resized(bias, size)


def _resized(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut off rows or add rows of zeros, to fit the base model's vocabulary."""
    missing = size - len(x)
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (missing,)) if missing > 0 else x[:size]
