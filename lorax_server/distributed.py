"""Tensor-parallel process groups, and shards of dimensions over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lorax_server.errors import ConfigError


class ProcessGroup(Protocol):
    """A tensor-parallel process group with the collective operations that layers use."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks. May modify `x`."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `x` from all ranks, concatenated along `dim`."""
        ...


@dataclass(frozen=True)
class FakeGroup:
    """A process group without communication, for a single process or for one rank in sharding tests."""

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
    """A process group with one process per rank. It uses gloo on CPUs and NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def make_host_group(self) -> "HostGroup":
        """Return another group with the same ranks, for use on another thread. All ranks must call this together."""
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
    """A process group whose ranks communicate through host memory, on any device."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return super().all_gather(x.cpu(), dim).to(x.device)


def join_process_group(
    rank: int, size: int, init_method: str, device: torch.device, timeout_s: float = 60
) -> TorchGroup:
    """Join and return the process group at `init_method` (`tcp://host:port` or `file:///path`).

    Blocks until all ranks have joined.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    world = dist.group.WORLD
    assert world is not None
    return TorchGroup(world)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a weight dimension, as index ranges of the full dimension in storage order.

    A weight, its bias, LoRA factor and DoRA magnitude along the same dimension use the same shard.
    """

    full: int
    ranges: tuple[tuple[int, int], ...]
    # (head_dim, rotary_dim) if the checkpoint stores RoPE pairs as adjacent elements. In the shard, the first elements
    # of all pairs precede the second elements, as the kernels expect.
    interleaved: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.full),) and self.interleaved is None

    def select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of the full tensor `x` along `dim`."""
        if self.is_whole:
            return x
        return self.reorder(
            torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim=dim), dim
        )

    def reorder(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `x`, this rank's part of a tensor, with interleaved RoPE pairs reordered into halves along `dim`."""
        if self.interleaved is None:
            return x
        head_dim, rotary_dim = self.interleaved
        indices = torch.arange(self.size, device=x.device).view(-1, head_dim)
        ordered = torch.cat([indices[:, :rotary_dim:2], indices[:, 1:rotary_dim:2], indices[:, rotary_dim:]], dim=1)
        return x.index_select(dim, ordered.flatten())


def make_full_shard(size: int) -> Shard:
    """Return a shard that covers the full dimension on every rank."""
    return Shard(size, ((0, size),))


def shard_evenly(group: ProcessGroup, size: int, name: str) -> Shard:
    """Return this rank's shard of a dimension that is split evenly.

    Raise `ConfigError` if `size` is not a multiple of the number of ranks.
    """
    return shard_units(group, [(size, 1)], name)


def shard_units(group: ProcessGroup, parts: Sequence[tuple[int, int]], name: str) -> Shard:
    """Return this rank's shard of a dimension that concatenates several parts.

    `parts` contains (number of units, unit size) pairs. A unit, usually a head, is not split. Parts are split
    separately. For example, GPT-2's fused query, key and value are three parts.
    """
    rank, ranks = group.rank(), group.size()
    ranges, offset = [], 0
    for units, unit_size in parts:
        if units % ranks != 0:
            raise ConfigError(f"{name} = {units} is not divisible by {ranks} tensor-parallel ranks")
        share = units // ranks * unit_size
        ranges.append((offset + rank * share, offset + (rank + 1) * share))
        offset += units * unit_size
    return Shard(offset, _merge_adjacent(ranges))


def shard_kv_heads(group: ProcessGroup, num_kv_heads: int, head_dim: int) -> Shard:
    """Return this rank's shard of the KV heads. If there are fewer heads than ranks, several ranks have the
    same head.
    """
    rank, ranks = group.rank(), group.size()
    if num_kv_heads < ranks and ranks % num_kv_heads == 0:
        head = rank * num_kv_heads // ranks
        return Shard(num_kv_heads * head_dim, ((head * head_dim, (head + 1) * head_dim),))
    return shard_units(group, [(num_kv_heads, head_dim)], "num_key_value_heads")


def shard_vocab(group: ProcessGroup, vocab_size: int) -> Shard:
    """Return this rank's shard of the vocabulary. The shards of the last ranks may be smaller or empty."""
    block = vocab_shard_size(group, vocab_size)
    start = min(group.rank() * block, vocab_size)
    return Shard(vocab_size, ((start, min(start + block, vocab_size)),))


def vocab_shard_size(group: ProcessGroup, vocab_size: int) -> int:
    """Return the number of vocabulary rows per rank, including padding on the last ranks."""
    return -(-vocab_size // group.size())


def join_shards(shards: Sequence[Shard]) -> Shard:
    """Return the shard for a concatenation of several sharded dimensions."""
    ranges, offset = [], 0
    for shard in shards:
        ranges += [(offset + start, offset + stop) for start, stop in shard.ranges]
        offset += shard.full
    return Shard(offset, _merge_adjacent(ranges))


def shard_grouped_qkv(heads: range, kv_heads: range, counts: tuple[int, int], head_dim: int) -> Shard:
    """Return the shard of a fused QKV matrix that stores each key head's queries before its key and value.

    `heads` and `kv_heads` are this rank's heads, `counts` the total numbers of query and KV heads. The rank stores all
    queries, then keys, then values.
    """
    sharing = counts[0] // counts[1]
    queries = [head + 2 * (head // sharing) for head in heads]
    keys = [(head + 1) * (sharing + 2) - 2 for head in kv_heads]
    units = [*queries, *keys, *(key + 1 for key in keys)]
    ranges = [(unit * head_dim, (unit + 1) * head_dim) for unit in units]
    return Shard((counts[0] + 2 * counts[1]) * head_dim, _merge_adjacent(ranges))


def _merge_adjacent(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges with adjacent ranges merged, so that the shard of a single rank is one range."""
    joined = ranges[:1]
    for start, stop in ranges[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
