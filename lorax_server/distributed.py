"""Tensor-parallel groups, and the part of a dimension that each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lorax_server.errors import ConfigError


class ProcessGroup(Protocol):
    """The operations that layers need of a group of ranks."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks; it may be computed in place."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `x` of every rank, side by side along `dim`."""
        ...


@dataclass(frozen=True)
class FakeGroup:
    """A group without communication: the whole of a single process, or one rank's view in a test of sharding."""

    _rank: int = 0
    _size: int = 1

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x if self._size == 1 else torch.cat([x] * self._size, dim=dim)


class TorchGroup:
    """Ranks in processes of their own: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def make_host_group(self) -> "HostGroup":
        """Make another group of the same ranks, for another thread; all ranks must do so at the same time."""
        return HostGroup(dist.new_group(dist.get_process_group_ranks(self._group), backend="gloo"))

    def rank(self) -> int:
        return dist.get_rank(self._group)

    def size(self) -> int:
        return dist.get_world_size(self._group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        gathered = [torch.empty_like(x) for _ in range(self.size())]
        dist.all_gather(gathered, x.contiguous(), group=self._group)
        return torch.cat(gathered, dim=dim)


class HostGroup(TorchGroup):
    """Ranks that communicate through host memory, wherever their tensors are."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return super().all_gather(x.cpu(), dim).to(x.device)


def join_group(rank: int, size: int, init_method: str, device: torch.device, timeout_s: float = 60) -> TorchGroup:
    """Meet the other ranks at `init_method` (`tcp://host:port` or `file:///path`); return when all are there."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    world = dist.group.WORLD
    assert world is not None
    return TorchGroup(world)


@dataclass(frozen=True)
class Shard:
    """The part of a dimension that one rank holds, as ranges of the full dimension in the order they are stored.

    A weight, its bias, a LoRA factor and a DoRA magnitude along the same dimension are all cut by the same shard.
    """

    full: int
    ranges: tuple[tuple[int, int], ...]
    # The size of a head and how many of its first dimensions are rotated in pairs of neighbours: they are stored with
    # the first of all pairs before the second of all, which is how kernels rotate.
    pairs: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.full),) and self.pairs is None

    def take(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a full tensor."""
        if self.is_whole:
            return x
        return self.order(torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim=dim), dim)

    def order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part, once its ranges are joined, in the order in which a head is rotated."""
        if self.pairs is None:
            return x
        head_dim, turned = self.pairs
        places = torch.arange(self.size, device=x.device).view(-1, head_dim)
        ordered = torch.cat([places[:, :turned:2], places[:, 1:turned:2], places[:, turned:]], dim=1)
        return x.index_select(dim, ordered.flatten())


def whole(size: int) -> Shard:
    """Let every rank hold all of the dimension."""
    return Shard(size, ((0, size),))


def shard_evenly(group: ProcessGroup, size: int, what: str) -> Shard:
    """Cut into equal stretches, of which rank `i` holds the `i`-th."""
    return shard_units(group, [(size, 1)], what)


def shard_units(group: ProcessGroup, parts: Sequence[tuple[int, int]], what: str) -> Shard:
    """Cut a dimension made of `parts`, each `(number of units, size of a unit)`, so that no unit is torn.

    A unit is a head, a part is what is cut on its own: GPT-2's fused query, key and value are three parts.
    """
    rank, ranks = group.rank(), group.size()
    ranges, offset = [], 0
    for units, unit_size in parts:
        if units % ranks != 0:
            raise ConfigError(f"{what} = {units} cannot be divided over {ranks} tensor-parallel ranks")
        share = units // ranks * unit_size
        ranges.append((offset + rank * share, offset + (rank + 1) * share))
        offset += units * unit_size
    return Shard(offset, _joined(ranges))


def shard_kv_heads(group: ProcessGroup, num_kv_heads: int, head_dim: int) -> Shard:
    """Divide key and value heads over the ranks, or let several ranks share each where there are fewer heads."""
    rank, ranks = group.rank(), group.size()
    if num_kv_heads < ranks and ranks % num_kv_heads == 0:
        head = rank * num_kv_heads // ranks
        return Shard(num_kv_heads * head_dim, ((head * head_dim, (head + 1) * head_dim),))
    return shard_units(group, [(num_kv_heads, head_dim)], "num_key_value_heads")


def shard_vocab(group: ProcessGroup, vocab_size: int) -> Shard:
    """Cut a vocabulary into stretches, all equal but the last ones, which may be shorter or empty."""
    block = vocab_block(group, vocab_size)
    start = min(group.rank() * block, vocab_size)
    return Shard(vocab_size, ((start, min(start + block, vocab_size)),))


def vocab_block(group: ProcessGroup, vocab_size: int) -> int:
    """Return the rows of the vocabulary per rank, counting the padding of the last ranks."""
    return -(-vocab_size // group.size())


def join_shards(shards: Sequence[Shard]) -> Shard:
    """Return the shard of one matrix in which others lie one after the other."""
    ranges, offset = [], 0
    for shard in shards:
        ranges += [(offset + start, offset + stop) for start, stop in shard.ranges]
        offset += shard.full
    return Shard(offset, _joined(ranges))


def shard_grouped(heads: range, kv_heads: range, counts: tuple[int, int], head_dim: int) -> Shard:
    """Return the shard of one matrix in which the queries of each key head come before its key and its value.

    A rank has some `heads` of queries and `kv_heads` of keys, of `counts`; it stores all queries, then keys, then
    values.
    """
    sharing = counts[0] // counts[1]
    queries = [head + 2 * (head // sharing) for head in heads]
    keys = [(head + 1) * (sharing + 2) - 2 for head in kv_heads]
    units = [*queries, *keys, *(key + 1 for key in keys)]
    ranges = [(unit * head_dim, (unit + 1) * head_dim) for unit in units]
    return Shard((counts[0] + 2 * counts[1]) * head_dim, _joined(ranges))


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch, so that the shard of a single rank is whole."""
    joined = ranges[:1]
    for start, stop in ranges[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
