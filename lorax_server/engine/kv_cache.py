"""Assigns KV blocks to sequences."""

import itertools
from collections.abc import Iterable

from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.sequence import Sequence

# Minimum number of equal leading prompt tokens for which a new sequence waits until another new sequence has computed
# them, so that both sequences share the KV blocks.
MIN_SHARED_TOKENS = 64


class KvCache:
    """Allocates KV blocks for sequences as they grow, and publishes full blocks for prefix caching."""

    def __init__(self, pool: BlockPool, can_reuse: bool) -> None:
        self._pool = pool
        self.can_reuse = can_reuse

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_tokens(self) -> int:
        return self._pool.num_blocks * self._pool.block_size

    @property
    def num_free_tokens(self) -> int:
        return self._pool.num_free * self._pool.block_size

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Acquire the cached blocks that match a sequence's prefix. The sequence must not have any blocks yet.

        At least one token remains to be computed, because sampling needs its logits. If prompt log probabilities are
        requested, no blocks are reused.
        """
        block_size, num_blocks = self._pool.block_size, 0
        if self.can_reuse and sequence.prompt_logprobs is None:
            num_blocks = (len(sequence.token_ids) - 1) // block_size
        sequence.blocks = self._pool.reuse(sequence.block_hashes(block_size)[:num_blocks])
        sequence.num_published = len(sequence.blocks)
        sequence.num_computed = sequence.capacity = len(sequence.blocks) * block_size

    def count_shared_blocks(self, leader: Sequence, sequence: Sequence) -> int:
        """Return how many additional blocks a sequence can reuse when `leader` has computed them. Return 0 if they
        have fewer than `MIN_SHARED_TOKENS` tokens.
        """
        if not self.can_reuse or sequence.prompt_logprobs is not None or leader.is_mixed:
            return 0
        first, last = len(sequence.blocks), (len(sequence.token_ids) - 1) // self.block_size
        # Published blocks that are not in the pool were copies of other blocks, or have been evicted.
        if leader.num_published > first or (last - first) * self.block_size < MIN_SHARED_TOKENS:
            return 0
        theirs, ours = leader.block_hashes(self.block_size), sequence.block_hashes(self.block_size)
        if theirs[first : first + 1] != ours[first : first + 1]:
            return 0
        pairs = zip(theirs[first:], ours[first:last], strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return count if count * self.block_size >= MIN_SHARED_TOKENS else 0

    def count_base_tokens(self, sequence: Sequence) -> int:
        """Return the number of computed tokens that are in blocks which do not depend on the sequence's adapter."""
        return min(sequence.num_computed, sequence.kv_adapter_start // self.block_size * self.block_size)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` more tokens. If too few blocks are free, allocate none and return
        False.
        """
        block_size, num_missing = self._pool.block_size, sequence.num_computed + num_tokens - sequence.capacity
        if num_missing > 0:
            blocks = self._pool.allocate(-(-num_missing // block_size))
            if blocks is None:
                return False
            sequence.blocks += blocks
            sequence.capacity += len(blocks) * block_size
        return True

    def publish_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Publish the full blocks of each sequence whose token IDs are known."""
        block_size = self._pool.block_size
        for sequence in sequences:
            num_published = sequence.num_published
            if sequence.num_computed < (num_published + 1) * block_size:  # the common case
                continue
            if sequence.is_mixed:
                continue
            num_full = min(sequence.num_computed, len(sequence.token_ids)) // block_size
            hashes = sequence.block_hashes(block_size)
            for index in range(num_published, num_full):
                self._pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_published = max(num_published, num_full)

    def rollback(self, sequence: Sequence, num_computed: int) -> None:
        """Reset a sequence's number of computed tokens after a failed step. The sequence keeps its blocks."""
        num_published = min(sequence.num_published, num_computed // self._pool.block_size)
        for block in sequence.blocks[num_published : sequence.num_published]:
            self._pool.unpublish(block)
        sequence.num_published, sequence.num_computed = num_published, num_computed

    def release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.is_mixed = [], False
        sequence.num_computed = sequence.num_published = sequence.num_sent_blocks = sequence.capacity = 0
