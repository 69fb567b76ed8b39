"""The pool of KV blocks: free blocks, reference counts and the map from hashes to blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0


class LruQueue:
    """Block ids in least-recently-used order; any id can be unlinked in constant time.

    A queue of positions in one array: `_position[id]` says where an id is live, so that unlinking
    clears that entry and leaves a hole which `pop` steps over. Everything is vectorised, which a
    linked list is not. The array is compacted when its end is reached, once per `num_blocks`
    pushes at most.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = np.zeros(2 * num_blocks, np.int32)
        self._position = np.full(num_blocks, -1, np.int64)
        self._head = 0
        self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block_id: int) -> bool:
        return bool(self._position[block_id] >= 0)

    def push(self, ids: NDArray[np.int32]) -> None:
        """Appends ids, none of which may be in the queue; the first is popped first."""
        if self._tail + len(ids) > len(self._ids):
            self._compact()
        start, self._tail = self._tail, self._tail + len(ids)
        self._ids[start : self._tail] = ids
        self._position[ids] = np.arange(start, self._tail)
        self._size += len(ids)

    def pop(self, count: int) -> NDArray[np.int32]:
        """Removes and returns the `count` least recently pushed ids (at most len(self))."""
        parts = []
        while count:
            end = min(self._tail, self._head + count + 16)
            window = self._ids[self._head : end]
            live = (self._position[window] == np.arange(self._head, end)).nonzero()[0][:count]
            part = window[live]
            self._head = self._head + int(live[-1]) + 1 if len(part) == count else end
            self._position[part] = -1
            self._size -= len(part)
            count -= len(part)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def remove(self, ids: NDArray[np.int32]) -> None:
        """Unlinks ids, all of which must be in the queue."""
        self._position[ids] = -1
        self._size -= len(ids)

    def ids(self) -> NDArray[np.int32]:
        """A copy of the ids in order."""
        window = self._ids[self._head : self._tail]
        return window[self._position[window] == np.arange(self._head, self._tail)]

    def _compact(self) -> None:
        ids = self.ids()
        self._ids[: len(ids)] = ids
        self._head, self._tail = 0, len(ids)
        self._position[ids] = np.arange(len(ids))


class BlockPool:
    """Blocks of the KV cache: who is free, how often each is used, and which can be found again.

    Block 0 is the null block that padded rows point at; it is never handed out. A free block is
    either blank (on a stack, reused first) or cached: its content is known by a hash and it lies
    in LRU order until it is hit or evicted. Freed blocks may be handed out at once although steps
    in flight still read or write them: the device runs steps in dispatch order, so the next
    owner's writes come later.

    Attributes:
      num_blocks: blocks, the null block included.
      ref_counts: int32 [num_blocks], requests that use each block.
      num_evictions: cached blocks that lost their content to a new owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.num_evictions = 0
        # The top of the stack is its end: low ids are handed out first.
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_blocks - 1
        self._lru = LruQueue(num_blocks)
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._has_hash = np.zeros(num_blocks, np.bool_)
        self._block_of: dict[bytes, int] = {}
        # Other blocks of equal content: two requests may compute the same block side by side.
        self._twins: dict[bytes, list[int]] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones that nobody uses included."""
        return self._num_blank + len(self._lru)

    @property
    def num_cached(self) -> int:
        """Blocks that a hash finds, used ones included."""
        return int(self._has_hash.sum())

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Hands out `count` blocks with one reference each; raises ValueError beyond num_free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, but {self.num_free} are free")
        blank = min(count, self._num_blank)
        end = self._num_blank
        self._num_blank = end - blank
        ids = self._blank[self._num_blank : end][::-1]
        if blank < count:
            evicted = self._lru.pop(count - blank)
            self._forget(evicted)
            self.num_evictions += len(evicted)
            ids = np.concatenate([ids, evicted]) if blank else evicted
        else:
            ids = ids.copy()
        self.ref_counts[ids] = 1
        return ids

    def num_unused(self, ids: NDArray[np.int32]) -> int:
        """How many of `ids` nobody uses: taking them uses up free capacity."""
        return int((self.ref_counts[ids] == 0).sum())

    def share(self, ids: NDArray[np.int32]) -> None:
        """Adds a reference to cached blocks; those that nobody used leave the free ones."""
        unused = ids[self.ref_counts[ids] == 0]
        if len(unused):
            self._lru.remove(unused)
        self.ref_counts[ids] += 1

    def release(self, ids: NDArray[np.int32]) -> int:
        """Drops one reference of each of a sequence's blocks, given in order.

        Blank ones are reused first. Cached ones go to the end of the LRU order, a sequence's last
        block before its first: a prefix is worth nothing without its beginning. Returns the
        number of blocks that became free.
        """
        self.ref_counts[ids] -= 1
        free = ids[self.ref_counts[ids] == 0][::-1]
        cached = self._has_hash[free]
        if cached.any():
            self._lru.push(free[cached])
            blank = free[~cached]
        else:
            blank = free
        self._blank[self._num_blank : self._num_blank + len(blank)] = blank
        self._num_blank += len(blank)
        return len(free)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of hashes."""
        found = []
        get = self._block_of.get
        for key in hashes:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, ids: NDArray[np.int32], hashes: Sequence[bytes]) -> None:
        """Makes blocks in use findable by the hashes of their (final) content."""
        block_of, hash_of = self._block_of, self._hash_of
        for block, key in zip(ids.tolist(), hashes):
            hash_of[block] = key
            if key in block_of:
                self._twins.setdefault(key, []).append(block)
            else:
                block_of[key] = block
        self._has_hash[ids] = True

    def reset_cache(self) -> bool:
        """Forgets all hashes; refuses with False while any block is in use."""
        if self.ref_counts.any():
            return False
        cached = self._lru.pop(len(self._lru))
        self._blank[self._num_blank : self._num_blank + len(cached)] = cached
        self._num_blank += len(cached)
        self._block_of.clear()
        self._twins.clear()
        self._hash_of = [None] * self.num_blocks
        self._has_hash[:] = False
        return True

    def _forget(self, ids: NDArray[np.int32]) -> None:
        hash_of, block_of, twins_of = self._hash_of, self._block_of, self._twins
        for block in ids.tolist():
            key = cast(bytes, hash_of[block])
            hash_of[block] = None
            if key not in twins_of:
                del block_of[key]
                continue
            twins = twins_of[key]
            if block_of[key] == block:
                block_of[key] = twins.pop(0)
            else:
                twins.remove(block)
            if not twins:
                del twins_of[key]
        self._has_hash[ids] = False

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one place."""
        blank = self._blank[: self._num_blank]
        cached = self._lru.ids()
        free = np.concatenate([blank, cached])
        assert len(cached) == len(self._lru), "the LRU order has lost count"
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert self.ref_counts[NULL_BLOCK] == 0, "the null block is in use"
        assert (self.ref_counts >= 0).all(), "a reference count is negative"
        assert not self.ref_counts[free].any(), "a block is free and in use"
        used = np.count_nonzero(self.ref_counts)
        assert len(free) + used == self.num_usable, (
            f"{self.num_usable - len(free) - used} blocks leaked"
        )
        assert not self._has_hash[blank].any(), "a blank block has a hash"
        assert self._has_hash[cached].all(), "a block in LRU order has no hash"
        keys: dict[bytes, set[int]] = {}
        for block, key in enumerate(self._hash_of):
            assert (key is not None) == self._has_hash[block], f"block {block}: hash out of step"
            if key is not None:
                keys.setdefault(key, set()).add(block)
        assert keys.keys() == self._block_of.keys(), "the hash map names other blocks"
        for key, blocks in keys.items():
            named = [self._block_of[key], *self._twins.get(key, [])]
            assert sorted(named) == sorted(blocks), "twins are out of step"


__all__ = ["NULL_BLOCK", "BlockPool", "LruQueue"]
