"""Which blocks each running request holds: the block table and its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.prefix_hash import block_hash, extend_block_hashes
from scheduler.request import Request

_NO_BLOCKS = np.zeros(0, np.int32)


class NewBlocks(NamedTuple):
    """Blocks appended to rows of the table: block_table[slots[i], index[i]] = ids[i]; int32."""

    slots: NDArray[np.int32]
    index: NDArray[np.int32]
    ids: NDArray[np.int32]


NO_NEW_BLOCKS = NewBlocks(_NO_BLOCKS, _NO_BLOCKS, _NO_BLOCKS)


class KVCacheManager:
    """Block table of the running requests, on top of a `BlockPool`.

    Attributes:
      pool: the blocks.
      block_table: int32 [max_num_seqs, max_blocks_per_seq], blocks of each slot in order; entries
        from num_held on are the null block.
      num_held: int32 [max_num_seqs], blocks that each slot holds.
      num_hashed: int32 [max_num_seqs], leading blocks that the prefix cache knows.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.block_table: NDArray[np.int32] = np.full(
            (config.max_num_seqs, config.max_blocks_per_seq), NULL_BLOCK, np.int32
        )
        self.num_held: NDArray[np.int32] = np.zeros(config.max_num_seqs, np.int32)
        self.num_hashed: NDArray[np.int32] = np.zeros(config.max_num_seqs, np.int32)
        self.enable_prefix_caching = config.enable_prefix_caching
        self._block_size = config.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def find_cached(self, request: Request, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Cached blocks of the longest known prefix of `token_ids`, without taking them.

        At least one token is left over, because computing it gives the next one's logits.
        """
        if not self.enable_prefix_caching or request.skip_prefix_cache_read:
            return _NO_BLOCKS
        count = (len(token_ids) - 1) // self._block_size
        hashes = request.block_hashes
        if len(hashes) < count:
            extend_block_hashes(hashes, token_ids, self._block_size, count, request.cache_salt)
        return np.array(self.pool.lookup(hashes[:count]), np.int32)

    def admit(self, slot: int, shared: NDArray[np.int32], num_new: int) -> None:
        """Gives an empty slot `shared` cached blocks and `num_new` new ones (checked before)."""
        count = len(shared)
        if count:
            # Taken first, so that allocating cannot evict them.
            self.pool.share(shared)
        row = self.block_table[slot]
        row[:count] = shared
        row[count : count + num_new] = self.pool.allocate(num_new)
        self.num_held[slot] = count + num_new
        self.num_hashed[slot] = count

    def take(self, shared: NDArray[np.int32], num_new: int) -> NDArray[np.int32]:
        """The blocks that `admit` would give, for a request that has no slot yet."""
        self.pool.share(shared)
        return np.concatenate([shared, self.pool.allocate(num_new)])

    def adopt(self, slot: int, blocks: NDArray[np.int32], num_hashed: int, num_new: int) -> None:
        """Gives an empty slot blocks taken before and `num_new` new ones.

        The prefix cache knows the first `num_hashed` of them.
        """
        held = len(blocks) + num_new
        row = self.block_table[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : held] = self.pool.allocate(num_new)
        self.num_held[slot] = held
        self.num_hashed[slot] = num_hashed

    def grow(self, slots: NDArray[np.intp], counts: NDArray[np.int32]) -> NewBlocks:
        """Appends counts[i] >= 1 blocks to slots[i]; the pool must have as many."""
        held = self.num_held[slots]
        if len(slots) == (total := int(counts.sum())):
            rows, index = slots, held
        else:
            rows = np.repeat(slots, counts)
            first = np.cumsum(counts) - counts
            index = np.arange(total, dtype=np.int32) + np.repeat(held - first, counts)
        ids = self.pool.allocate(total)
        self.block_table[rows, index] = ids
        self.num_held[slots] = held + counts
        return NewBlocks(rows.astype(np.int32), index.astype(np.int32), ids)

    def release(self, slot: int) -> int:
        """Takes all blocks from `slot`; returns how many became free."""
        held = self.num_held[slot]
        row = self.block_table[slot]
        freed = self.pool.release(row[:held])
        row[:held] = NULL_BLOCK
        self.num_held[slot] = 0
        self.num_hashed[slot] = 0
        return freed

    def blocks_of(self, slot: int) -> NDArray[np.int32]:
        """The blocks of a slot in order; a view."""
        return self.block_table[slot, : self.num_held[slot]]

    def num_private(self, slot: int) -> int:
        """Blocks that become free if `slot` is released."""
        if not self.enable_prefix_caching:
            return int(self.num_held[slot])
        return int((self.pool.ref_counts[self.blocks_of(slot)] == 1).sum())

    def cache_blocks(
        self, slot: int, request: Request, token_ids: NDArray[np.int32], num_tokens: int
    ) -> None:
        """Makes the full blocks of a slot's first `num_tokens` computed tokens findable."""
        count = num_tokens // self._block_size
        known = int(self.num_hashed[slot])
        if count <= known:
            return
        hashes = request.block_hashes
        if len(hashes) < count:
            extend_block_hashes(hashes, token_ids, self._block_size, count, request.cache_salt)
        self.pool.register(self.block_table[slot, known:count], hashes[known:count])
        self.num_hashed[slot] = count

    def cache_decoded(
        self,
        requests: Sequence[Request],
        slots: NDArray[np.intp],
        token_ids: NDArray[np.int32],
    ) -> None:
        """Makes the next block of each of `slots` findable; its tokens are known and computed.

        The batched form of `cache_blocks` for decodes, which fill one block at a time.
        """
        bs = self._block_size
        first = self.num_hashed[slots].astype(np.intp)
        keys = []
        for request, slot, index in zip(requests, slots.tolist(), first.tolist()):
            hashes = request.block_hashes
            # A resumed request may know the hashes of blocks that it has not filled again.
            if len(hashes) == index:
                if index:
                    tokens = token_ids[slot, index * bs : (index + 1) * bs].tobytes()
                    hashes.append(block_hash(hashes[-1], tokens))
                else:
                    extend_block_hashes(hashes, token_ids[slot], bs, 1, request.cache_salt)
            keys.append(hashes[index])
        self.pool.register(self.block_table[slots, first], keys)
        self.num_hashed[slots] = first + 1


__all__ = ["NO_NEW_BLOCKS", "KVCacheManager", "NewBlocks"]
