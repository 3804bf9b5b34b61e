"""Blocks of the key-value cache: their holders, and the blocks that serve prompts with the same beginning again.

A block of tokens is known by a hash of all that its keys and values depend on: the tokens of the block and of all
blocks before it, and the root of the sequence (`root_hash`). So a block that is found by its hash is right, and nothing
is ever invalidated: a replaced adapter has another identity, and its prompts another root.

Steps run in the order in which they are submitted. Therefore a block may be used again as soon as it is released,
although steps in flight still read it. Other sequences may find it once the step that fills it is submitted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256


def root_hash(identity: str, rope_variant: str = "", salt: str = "") -> bytes:
    """Hash all that keys and values depend on besides tokens, and the salt, within which prompts are shared."""
    fields = [text.encode() for text in (identity, rope_variant, salt)]
    return sha256(b"".join(len(field).to_bytes(8, "big") + field for field in fields)).digest()


def chain_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full block whose predecessor, or root, has the hash `before`."""
    return sha256(before + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Counts the holders of each block. A block without holders keeps its content until it is needed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0  # published blocks that were needed for other tokens
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}  # blocks by hash
        # Blocks without holders, in the order they are taken: unpublished ones first, then the longest unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Return how many blocks `allocate` can give."""
        return len(self._free)

    def reuse(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest published beginning of this chain."""
        blocks = []
        for block_hash in hashes:
            block = self._published.get(block_hash)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Hold so many blocks of unknown content; None, and nothing changes, if there are too few."""
        if count > len(self._free):
            return None
        return [self._take() for _ in range(count)]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let other sequences find a block. The step that computes its last token must have been submitted."""
        assert self._holders[block] > 0, f"block {block} has no holder"
        assert self._hashes[block] in (None, block_hash), f"block {block} holds something else"
        if block_hash not in self._published:  # else another sequence has computed the same block
            self._hashes[block] = block_hash
            self._published[block_hash] = block

    def unpublish(self, block: int) -> None:
        """Let no other sequence find a block, which has not been computed after all. No other one has it yet."""
        assert self._holders[block] == 1, f"block {block} has {self._holders[block]} holders"
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one sequence's blocks, listed from its first token on.

        Later blocks will be taken first, since they are of no use without earlier ones.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} has no holder"
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
            del self._published[block_hash]
            self._hashes[block] = None
            self.num_evictions += 1
        self._holders[block] = 1
        return block
