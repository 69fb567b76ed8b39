"""The KV manager against a model that knows the content of every block."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler import KVCacheManager, Request, SchedulerConfig

BLOCK_SIZE = 3
NUM_SLOTS = 4
CONFIG = SchedulerConfig(
    num_blocks=14,
    block_size=BLOCK_SIZE,
    max_num_seqs=NUM_SLOTS,
    max_model_len=30,
    enable_prefix_caching=True,
)


def _request(tokens, **kwargs) -> Request:
    return Request("r", np.array(tokens, np.int32), 5, **kwargs)


def test_growth_of_many_rows_is_one_allocation():
    kv = KVCacheManager(CONFIG)
    nothing = np.zeros(0, np.int32)
    for slot, count in ((0, 1), (1, 2), (3, 1)):
        kv.admit(slot, nothing, count)
    grown = kv.grow(np.array([0, 3, 1]), np.array([2, 1, 3], np.int32))
    assert grown.slots.tolist() == [0, 0, 3, 1, 1, 1]
    assert grown.index.tolist() == [1, 2, 1, 2, 3, 4]
    assert kv.num_held.tolist() == [3, 5, 0, 2]
    assert kv.block_table[grown.slots, grown.index].tolist() == grown.ids.tolist()
    assert len(set(kv.block_table[kv.block_table > 0].tolist())) == 10


def test_released_rows_point_at_the_null_block():
    kv = KVCacheManager(CONFIG)
    kv.admit(2, np.zeros(0, np.int32), 4)
    assert kv.release(2) == 4
    assert not kv.block_table.any()
    assert kv.pool.num_free == kv.pool.num_usable


def test_private_blocks_are_those_that_nobody_shares():
    kv = KVCacheManager(CONFIG)
    tokens = np.arange(9, dtype=np.int32)
    owner = _request(tokens)
    kv.admit(0, kv.find_cached(owner, tokens), 3)
    kv.cache_blocks(0, owner, tokens, 9)
    sharer = _request(np.arange(8))
    shared = kv.find_cached(sharer, np.arange(8, dtype=np.int32))
    assert len(shared) == 2
    kv.admit(1, shared, 1)
    assert (kv.num_private(0), kv.num_private(1)) == (1, 1)
    assert kv.release(0) == 1
    assert kv.num_private(1) == 3


class KVMachine(RuleBasedStateMachine):
    """Admits, grows, computes, caches and releases sequences over a tiny alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(CONFIG)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        # What each block's KV was computed from: salt and all tokens up to the block's end.
        self.content: dict[int, tuple] = {}

    def _write(self, slot: int, start: int, end: int) -> None:
        salt, tokens = self.requests[slot].cache_salt, self.tokens[slot]
        blocks = self.kv.blocks_of(slot)
        for position in range(start, end):
            self.content[int(blocks[position // BLOCK_SIZE])] = (salt, *tokens[: position + 1])

    @precondition(lambda self: len(self.requests) < NUM_SLOTS)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from([None, "a"]),
        skip=st.booleans(),
    )
    def admit(self, tokens, salt, skip) -> None:
        kv = self.kv
        request = _request(tokens, cache_salt=salt, skip_prefix_cache_read=skip)
        array = request.prompt_token_ids
        free, counts = kv.pool.num_free, kv.pool.ref_counts.copy()
        shared = kv.find_cached(request, array)
        assert kv.pool.num_free == free, "looking takes nothing"
        assert (kv.pool.ref_counts == counts).all()
        hit = len(shared) * BLOCK_SIZE
        assert hit <= len(tokens) - 1
        assert not (skip and hit)
        for i, block in enumerate(shared.tolist()):
            assert self.content[block] == (salt, *tokens[: (i + 1) * BLOCK_SIZE]), "foreign KV"
        new = kv.blocks_for(len(tokens)) - len(shared)
        needed = new + kv.pool.num_unused(shared)
        if needed > free:
            return
        slot = min(set(range(NUM_SLOTS)) - set(self.requests))
        kv.admit(slot, shared, new)
        assert kv.pool.num_free == free - needed
        assert kv.blocks_of(slot)[: len(shared)].tolist() == shared.tolist()
        self.requests[slot], self.tokens[slot], self.computed[slot] = request, tokens, hit

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        start, known = self.computed[slot], len(self.tokens[slot])
        end = data.draw(st.integers(start, known))
        self._write(slot, start, end)
        self.computed[slot] = end
        tokens = np.array(self.tokens[slot], np.int32)
        self.kv.cache_blocks(slot, self.requests[slot], tokens, end)
        assert self.kv.num_hashed[slot] == end // BLOCK_SIZE

    @precondition(lambda self: self.requests)
    @rule(token=st.integers(0, 1), data=st.data())
    def decode(self, token: int, data) -> None:
        """All finished prefills sample a token and run it, as one step of decodes."""
        ready = [
            slot
            for slot in sorted(self.requests)
            if self.computed[slot] == len(self.tokens[slot]) < CONFIG.max_model_len
        ]
        slots = ready[: self.kv.pool.num_free]
        if not slots:
            return
        table = np.zeros((NUM_SLOTS, CONFIG.max_model_len), np.int32)
        need = [s for s in slots if len(self.tokens[s]) == BLOCK_SIZE * self.kv.num_held[s]]
        if need:
            self.kv.grow(np.array(need), np.ones(len(need), np.int32))
        for slot in slots:
            self.tokens[slot].append(token)
            self._write(slot, len(self.tokens[slot]) - 1, len(self.tokens[slot]))
            self.computed[slot] += 1
            table[slot, : len(self.tokens[slot])] = self.tokens[slot]
        full = [s for s in slots if self.computed[s] // BLOCK_SIZE > self.kv.num_hashed[s]]
        if full:
            self.kv.cache_decoded([self.requests[s] for s in full], np.array(full), table)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        private = self.kv.num_private(slot)
        assert self.kv.release(slot) == private
        for of in (self.requests, self.tokens, self.computed):
            del of[slot]

    @invariant()
    def agrees(self) -> None:
        kv = self.kv
        kv.pool.check_integrity()
        counts = np.zeros(CONFIG.num_blocks, int)
        for slot in range(NUM_SLOTS):
            held = int(kv.num_held[slot])
            assert not kv.block_table[slot, held:].any()
            assert (kv.block_table[slot, :held] > 0).all()
            np.add.at(counts, kv.block_table[slot, :held], 1)
        assert (counts == kv.pool.ref_counts).all()
        for slot, computed in self.computed.items():
            salt, tokens = self.requests[slot].cache_salt, self.tokens[slot]
            for i in range(computed // BLOCK_SIZE):
                block = int(kv.block_table[slot, i])
                assert self.content[block] == (salt, *tokens[: (i + 1) * BLOCK_SIZE])


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
