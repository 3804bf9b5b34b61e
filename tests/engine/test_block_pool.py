"""The block pool: prefix matches are correct, referenced blocks stay, and no block is lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorax_server.engine.block_pool import BlockPool, chain_hash, root_hash

BASE = root_hash("base")
SIZE = 2


def chain(*tokens: int, root: bytes = BASE) -> list[bytes]:
    """Return the hashes of all full blocks."""
    hashes, before = [], root
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        before = chain_hash(before, tokens[start : start + SIZE])
        hashes.append(before)
    return hashes


def compute(pool: BlockPool, *tokens: int, root: bytes = BASE) -> list[int]:
    """Return the published blocks of a computed sequence."""
    hashes = chain(*tokens, root=root)
    blocks = pool.reuse(hashes)
    more = pool.allocate(-(-len(tokens) // SIZE) - len(blocks))
    assert more is not None
    blocks += more
    for block, block_hash in zip(blocks, hashes, strict=False):
        pool.publish(block, block_hash)
    return blocks


# --- Hashes -----------------------------------------------------------------------------------------------------------


def test_root_hash_depends_on_all_fields_and_boundaries() -> None:
    roots = {root_hash(*parts) for parts in (("a",), ("b",), ("a", "x"), ("a", "", "x"), ("ax",), ("", "a", "x"))}
    assert len(roots) == 6


def test_hash_depends_on_all_previous_tokens() -> None:
    assert chain(1, 2, 3, 4)[1] != chain(5, 2, 3, 4)[1]
    assert chain(1, 2, 3, 4)[0] == chain(1, 2, 9, 9)[0]
    assert chain(1, 2)[0] != chain(2, 1)[0]


def test_hash_depends_on_adapter() -> None:
    pool = BlockPool(8, SIZE)
    compute(pool, 1, 2, 3, 4)
    assert pool.reuse(chain(1, 2, 3, 4, root=root_hash("adapter"))) == []


# --- Errors in LoRAX's allocator --------------------------------------------------------------------------------------


def test_prefix_match_stops_at_first_difference() -> None:
    pool = BlockPool(16, SIZE)
    for tokens in ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6, 7)):
        pool.release(compute(pool, *tokens))
    first = pool.reuse(chain(0, 1))
    assert pool.reuse(chain(0, 1, 4, 5)) == first


def test_fully_cached_prompt_is_acquired() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(compute(pool, 0, 1, 2, 3))
    result = pool.reuse(chain(0, 1, 2, 3))
    others = pool.allocate(2)
    assert others is not None
    assert not set(result) & set(others)
    assert pool.allocate(1) is None


def test_allocation_does_not_evict_own_prefix() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(compute(pool, 0, 1, 2, 3, 4, 5))
    result = pool.reuse(chain(0, 1, 2, 3, 4, 5))
    more = pool.allocate(1)
    assert more is not None
    assert len({*result, *more}) == 4
    assert pool.allocate(1) is None


def test_unpublished_blocks_are_not_found() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    assert pool.reuse(chain(0, 1, 2, 3)) == []


# --- Acquire and release ----------------------------------------------------------------------------------------------


def test_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(3, SIZE)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.release(held)
    assert pool.num_free == 3


def test_unpublished_blocks_are_allocated_first() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(compute(pool, 0, 1, 2, 3, 4))  # the third block is not full
    taken = pool.allocate(2)
    assert taken is not None
    assert pool.num_evictions == 0
    assert len(pool.reuse(chain(0, 1, 2, 3))) == 2


def test_eviction_order_is_lru_with_last_block_first() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(compute(pool, 0, 1, 2, 3))
    pool.release(compute(pool, 5, 6, 7, 8))
    pool.release(pool.reuse(chain(0, 1, 2, 3)))  # used again, so 5, 6, 7, 8 is now the oldest
    assert pool.allocate(1) is not None
    assert len(pool.reuse(chain(0, 1, 2, 3))) == 2
    assert len(pool.reuse(chain(5, 6, 7, 8))) == 1
    assert pool.num_evictions == 1


def test_duplicate_blocks_are_published_once() -> None:
    pool = BlockPool(4, SIZE)
    one, other = pool.allocate(1), pool.allocate(1)
    assert one is not None
    assert other is not None
    for block in (*one, *other):
        pool.publish(block, chain(0, 1)[0])
    assert len(pool._published) == 1
    pool.release(one)
    pool.release(other)
    assert pool.reuse(chain(0, 1)) == one
    assert pool.num_free == 3


def test_shared_block_is_free_after_last_release() -> None:
    pool = BlockPool(2, SIZE)
    first = compute(pool, 0, 1)
    second = pool.reuse(chain(0, 1))
    pool.release(first)
    assert pool.num_free == 1
    pool.release(second)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="is not allocated"):
        pool.release(second)


# --- Random operations ------------------------------------------------------------------------------------------------


@dataclass
class ExpectedSequence:
    """A test sequence: its tokens and expected blocks."""

    tokens: list[int]
    root: bytes
    blocks: list[int]
    published: int = field(default=0)


class BlockPoolStateMachine(RuleBasedStateMachine):
    """A pool with a device model. `content` must match every block that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, SIZE)
        self.content: dict[int, bytes] = {}
        self.held: list[ExpectedSequence] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), adapter=st.sampled_from(["", "a"]))
    def start_sequence(self, tokens: list[int], adapter: str) -> None:
        root = root_hash(adapter)
        hashes = chain(*tokens, root=root)
        blocks = self.pool.reuse(hashes)
        assert [self.content[block] for block in blocks] == hashes[: len(blocks)]
        more = self.pool.allocate(-(-len(tokens) // SIZE) - len(blocks))
        if more is None:
            self.pool.release(blocks)
            return
        for block in more:
            self.content[block] = b"garbage"
        self.held.append(ExpectedSequence(tokens, root, blocks + more, len(blocks)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_some(self, data: st.DataObject) -> None:
        """Write and publish a block, as a step does."""
        sequence = data.draw(st.sampled_from(self.held))
        hashes = chain(*sequence.tokens, root=sequence.root)
        if sequence.published < len(hashes):
            block, block_hash = sequence.blocks[sequence.published], hashes[sequence.published]
            self.content[block] = block_hash
            self.pool.publish(block, block_hash)
            sequence.published += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Release a sequence that finished or was aborted or preempted."""
        sequence = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(sequence.blocks)

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {block for sequence in self.held for block in sequence.blocks}
        assert len(held) + self.pool.num_free == self.pool.num_blocks

    @invariant()
    def computed_blocks_are_kept(self) -> None:
        for sequence in self.held:
            hashes = chain(*sequence.tokens, root=sequence.root)
            for block, block_hash in zip(sequence.blocks[: sequence.published], hashes, strict=False):
                assert self.content[block] == block_hash


TestMachine = BlockPoolStateMachine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
