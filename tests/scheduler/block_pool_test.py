"""The block pool against simple models of it."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler import NULL_BLOCK, BlockPool
from scheduler.block_pool import LruQueue

NUM_BLOCKS = 17


def _ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_null_block_is_never_handed_out():
    pool = BlockPool(8)
    assert (pool.num_usable, pool.num_free) == (7, 7)
    blocks = pool.allocate(7)
    assert sorted(blocks.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_BLOCK not in blocks
    with pytest.raises(ValueError, match="1 blocks asked for, but 0 are free"):
        pool.allocate(1)
    pool.check_integrity()


def test_blank_blocks_are_reused_last_in_first_out():
    pool = BlockPool(8)
    first = pool.allocate(3)
    pool.release(first)
    assert pool.allocate(3).tolist() == first.tolist()


def test_one_allocation_never_hands_out_a_block_twice():
    pool = BlockPool(40)
    for round_ in range(30):
        blocks = pool.allocate(39)
        assert len(set(blocks.tolist())) == 39
        pool.register(blocks[::3], [bytes([round_, i]) for i in range(13)])
        pool.release(blocks)
    pool.check_integrity()


def test_release_counts_what_became_free():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.register(blocks[:2], [b"a", b"b"])
    pool.share(blocks[:2])
    assert pool.release(blocks) == 1
    assert pool.release(blocks[:2]) == 2
    assert pool.num_cached == 2


def test_a_twin_takes_over_when_the_first_is_evicted():
    pool = BlockPool(4)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.register(one, [b"same"])
    pool.register(two, [b"same"])
    assert pool.lookup([b"same"]) == one.tolist()
    pool.release(one)
    pool.allocate(2)
    assert pool.lookup([b"same"]) == two.tolist()
    pool.release(two)
    pool.allocate(1)
    assert pool.lookup([b"same"]) == []
    pool.check_integrity()


def test_evicting_the_second_twin_keeps_the_first():
    pool = BlockPool(4)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.register(one, [b"same"])
    pool.register(two, [b"same"])
    pool.release(two)
    pool.allocate(2)
    assert pool.lookup([b"same"]) == one.tolist()
    pool.check_integrity()


def test_lookup_stops_at_the_first_gap():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.register(blocks, [b"1", b"2", b"4"])
    assert pool.lookup([b"1", b"2", b"3", b"4"]) == blocks[:2].tolist()


def test_integrity_check_sees_planted_faults():
    def pool() -> tuple[BlockPool, np.ndarray]:
        made = BlockPool(8)
        blocks = made.allocate(4)
        made.register(blocks[:2], [b"a", b"b"])
        made.release(blocks[:1])
        return made, blocks

    broken, blocks = pool()
    broken.ref_counts[blocks[3]] = 0
    with pytest.raises(AssertionError, match="1 blocks leaked"):
        broken.check_integrity()
    broken, blocks = pool()
    broken.ref_counts[blocks[0]] = 1
    with pytest.raises(AssertionError, match="free and in use"):
        broken.check_integrity()
    broken, blocks = pool()
    del broken._block_of[b"a"]
    with pytest.raises(AssertionError, match="hash map"):
        broken.check_integrity()
    broken, blocks = pool()
    broken._lru.push(_ids(int(broken._blank[0])))
    with pytest.raises(AssertionError, match="free twice"):
        broken.check_integrity()
    broken, blocks = pool()
    broken.ref_counts[blocks[1]] = -1
    with pytest.raises(AssertionError, match="negative"):
        broken.check_integrity()


class LruMachine(RuleBasedStateMachine):
    """`LruQueue` against an OrderedDict."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LruQueue(NUM_BLOCKS)
        self.model: OrderedDict[int, None] = OrderedDict()

    @rule(data=st.data())
    def push(self, data) -> None:
        outside = [b for b in range(NUM_BLOCKS) if b not in self.model]
        blocks = data.draw(st.lists(st.sampled_from(outside or [0]), unique=True))
        blocks = blocks if outside else []
        self.queue.push(_ids(*blocks))
        self.model.update(dict.fromkeys(blocks))

    @rule(data=st.data())
    def pop(self, data) -> None:
        count = data.draw(st.integers(0, len(self.model)))
        expected = [self.model.popitem(last=False)[0] for _ in range(count)]
        assert self.queue.pop(count).tolist() == expected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.model)), unique=True))
        self.queue.remove(_ids(*blocks))
        for block in blocks:
            del self.model[block]

    @invariant()
    def same_order(self) -> None:
        assert self.queue.ids().tolist() == list(self.model)
        assert len(self.queue) == len(self.model)
        assert all((block in self.queue) == (block in self.model) for block in range(NUM_BLOCKS))


class PoolMachine(RuleBasedStateMachine):
    """`BlockPool` against sets and lists: sequences hold blocks, keys name contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.sequences: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.lru: list[int] = []
        self.next_key = 0

    def _used(self) -> set[int]:
        return {block for sequence in self.sequences for block in sequence}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            before = (self.pool.num_free, self.pool.ref_counts.copy())
            with pytest.raises(ValueError):
                self.pool.allocate(count)
            assert self.pool.num_free == before[0]
            assert (self.pool.ref_counts == before[1]).all()
            return
        blank = self.pool.num_free - len(self.lru)
        blocks = self.pool.allocate(count).tolist()
        evicted = blocks[blank:] if count > blank else []
        assert evicted == self.lru[: len(evicted)], "cached blocks go in LRU order, after blank"
        for block in evicted:
            del self.key_of[block]
        del self.lru[: len(evicted)]
        assert not set(blocks) & self._used()
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), twin=st.booleans())
    def register(self, data, twin: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        blocks = [b for b in sequence if b not in self.key_of][:2]
        keys = []
        for _ in blocks:
            if twin and self.key_of:
                keys.append(data.draw(st.sampled_from(sorted(self.key_of.values()))))
            else:
                keys.append(b"%d" % self.next_key)
                self.next_key += 1
        self.pool.register(_ids(*blocks), keys)
        self.key_of.update(zip(blocks, keys))

    @precondition(lambda self: self.key_of)
    @rule(data=st.data())
    def hit(self, data) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(set(self.key_of.values()))), unique=True))
        found = self.pool.lookup(keys)
        assert [self.key_of[block] for block in found] == keys
        assert self.pool.num_unused(_ids(*found)) == len(set(found) & set(self.lru))
        self.pool.share(_ids(*found))
        self.lru = [block for block in self.lru if block not in found]
        self.sequences.append(found)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        sequence = self.sequences.pop(index)
        freed = self.pool.release(_ids(*sequence))
        gone = [block for block in reversed(sequence) if block not in self._used()]
        assert freed == len(gone)
        self.lru += [block for block in gone if block in self.key_of]

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not self._used())
        if not self._used():
            self.key_of.clear()
            self.lru.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        counts = np.zeros(NUM_BLOCKS, int)
        for sequence in self.sequences:
            np.add.at(counts, sequence, 1)
        assert (self.pool.ref_counts == counts).all()
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(self._used())
        assert self.pool._lru.ids().tolist() == self.lru
        known = set(self.key_of.values())
        assert self.pool.num_cached == len(self.key_of)
        for number in range(self.next_key):
            key = b"%d" % number
            found = self.pool.lookup([key])
            assert bool(found) == (key in known), "an old key is still found, or a live one lost"


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
