"""Chain hashes that find a prefix again: each block's hash covers all tokens before it."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# A cryptographic hash, because equal hashes mean shared KV: a weak one would let one tenant craft
# a prompt that reads another's.
# The full digest of 64 bytes, since asking for a shorter one costs more than it saves.
_NO_SALT = blake2b(b"").digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a full block: its tokens' bytes (int32, native order) after the parent's hash."""
    return blake2b(parent + tokens).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: NDArray[np.int32],
    block_size: int,
    num_blocks: int,
    cache_salt: str | None = None,
) -> None:
    """Appends to `hashes` until it covers the first `num_blocks` full blocks of `token_ids`.

    Args:
      hashes: hashes of the first blocks, possibly none; extended in place.
      token_ids: int32 [at least num_blocks * block_size].
      block_size: tokens per block.
      num_blocks: full blocks to cover.
      cache_salt: goes into the first block's hash and so into all that follow.
    """
    first = len(hashes)
    if first >= num_blocks:
        return
    if hashes:
        parent = hashes[-1]
    elif cache_salt is None:
        parent = _NO_SALT
    else:
        parent = blake2b(b"salt" + cache_salt.encode()).digest()
    data = token_ids[first * block_size : num_blocks * block_size].tobytes()
    step = 4 * block_size
    append = hashes.append
    for i in range(0, len(data), step):
        parent = blake2b(parent + data[i : i + step]).digest()
        append(parent)


__all__ = ["block_hash", "extend_block_hashes"]
