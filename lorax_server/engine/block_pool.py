"""A KV block allocator with prefix caching.

A full block is identified by a hash of everything that determines its keys and values: its tokens, the tokens of all
previous blocks, `root_hash` (RoPE variant, salt), and, if an adapter changes them, its identity (`adapter_hash`). A
hash match is therefore always correct, and the cache needs no invalidation: replacing an adapter changes its identity.

Steps run in submission order. A released block can be reused immediately, even if steps in flight still read it.
A block can be published as soon as the step that fills it is submitted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256


def root_hash(*fields: str) -> bytes:
    """Return the root of a sequence's hash chain. Sequences share blocks only if their root hashes are equal."""
    encoded = [text.encode() for text in fields]
    return sha256(b"".join(len(field).to_bytes(8, "big") + field for field in encoded)).digest()


def adapter_hash(before: bytes, identity: str, start: int) -> bytes:
    """Return the hash that replaces `before` in the chain, in front of the first block that depends on the adapter.

    `start` is the position of the first token that the adapter applies to. It is part of the hash.
    """
    return root_hash(before.hex(), identity, str(start))


def chain_hash(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block. `parent_hash` is the previous block's hash, or the root hash."""
    return sha256(parent_hash + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Allocates reference-counted KV blocks. An unreferenced block keeps its content until it is reallocated."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0  # published blocks that were reallocated
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}  # blocks by hash
        # Unreferenced blocks in allocation order: unpublished blocks, then published blocks, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Return the number of blocks available to `allocate`."""
        return len(self._free)

    def reuse(self, hashes: Sequence[bytes]) -> list[int]:
        """Acquire and return the published blocks that match the longest possible prefix of `hashes`."""
        blocks = []
        for block_hash in hashes:
            block = self._published.get(block_hash)
            if block is None:
                break
            self._acquire(block)
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Acquire and return `count` blocks, or return None if too few blocks are free."""
        if count > len(self._free):
            return None
        return [self._pop_free() for _ in range(count)]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full block available to other sequences. The step that fills the block must already be submitted."""
        assert self._ref_counts[block] > 0, f"block {block} is not allocated"
        assert self._hashes[block] in (None, block_hash), f"block {block} has a different hash"
        if block_hash not in self._published:  # otherwise another sequence has published the same content
            self._hashes[block] = block_hash
            self._published[block_hash] = block

    def unpublish(self, block: int) -> None:
        """Undo `publish` for a block that was not computed. No other sequence may have acquired the block."""
        assert self._ref_counts[block] == 1, f"block {block} has {self._ref_counts[block]} references"
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Release a sequence's blocks, given in token order.

        Later blocks are reallocated first, because they are useless without the earlier blocks.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is not allocated"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def _acquire(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block
