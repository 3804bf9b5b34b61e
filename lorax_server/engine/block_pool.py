"""Blocks of the key-value cache: who holds which, and which can be used again for a prompt that begins alike.

A block of tokens is known by a hash of all that its keys and values depend on: the tokens of the block and of all
blocks before it, and what the sequence began with (`root_hash`). So a hash that is found is right, and there is nothing
to invalidate: a replaced adapter has another identity, and its prompts another root.

Steps run in the order in which they are submitted. Therefore a block may be used again as soon as it is released,
although steps in flight still read it, and it may be found by others once the step that fills it is submitted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256


def root_hash(identity: str, rope_variant: str = "", salt: str = "") -> bytes:
    """What a sequence's keys and values depend on besides its tokens, and `salt` for those who share with nobody."""
    parts = [part.encode() for part in (identity, rope_variant, salt)]
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def chain_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block whose predecessor, or root, has the hash `before`."""
    return sha256(before + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Counts the holders of each block. A block without holders keeps what it has until it is needed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0  # blocks that had something to be found and were needed
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}  # by hash: the block to be used again
        # Those without holders, in the order they are taken: with nothing to be found first, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, whatever they hold."""
        return len(self._free)

    def reuse(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest beginning of this chain that is there."""
        blocks = []
        for block_hash in hashes:
            block = self._found.get(block_hash)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Hold so many blocks of unknown content; None, and nothing is changed, if there are not as many."""
        if count > len(self._free):
            return None
        return [self._take() for _ in range(count)]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a block. The step that computes the last of its tokens must have been submitted."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        assert self._hashes[block] in (None, block_hash), f"block {block} holds something else"
        if block_hash not in self._found:  # else another sequence has computed the same: one of them is enough
            self._hashes[block] = block_hash
            self._found[block_hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one sequence's blocks, given from its first token on. Later ones will be taken before earlier ones,
        since those are of no use without them."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is held by nobody"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._found[block_hash]
            self._hashes[block] = None
            self.num_evictions += 1
        self._holders[block] = 1
        return block
