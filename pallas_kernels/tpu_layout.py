"""How the TPU kernels lay out KV pages and queries.

A page holds one contiguous run per KV head, so that a head's keys are a ready MXU operand: tokens
in sublanes, features in the 128 lanes, no strided loads and no unpacking of 16-bit pairs.

    pages [N, H, C, S, L]     head_dim > 64: C = 2, L = head_dim padded to 128 lanes

      page n:  | head 0             | head 1             | ...
               | K [S, L] | V [S, L] | K [S, L] | V [S, L] |

    head_dim <= 64: C = 1, L = 128, K and V side by side in the lanes (no padding at 64)

      page n:  | head 0: S rows of (K 0..63 | V 64..127) | head 1 ...

In the packed form a query has zeros in lanes 64.., so that q . (K|V) is q . K, and p @ (K|V) holds
the output in its upper lanes: the MXU works in whole 128-lane tiles anyway.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, Shaped

from pallas_kernels.attention_types import KVCacheSpec
from pallas_kernels.validation import check_spec

LANES = 128
SUBLANES = 8
KV_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Physical shape of a layer's pages.

    Attributes:
      packed: K and V share the lanes of one row.
      lanes: width of a stored row, a multiple of 128.
      value_lane: lane at which V starts in the row that holds it.
    """

    spec: KVCacheSpec
    packed: bool
    lanes: int

    @property
    def parts(self) -> int:
        """Separate [page_size, lanes] arrays per head: K and V, or both in one."""
        return 1 if self.packed else 2

    @property
    def value_lane(self) -> int:
        return LANES // 2 if self.packed else 0

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        spec = self.spec
        return (spec.num_pages, spec.num_kv_heads, self.parts, spec.page_size, self.lanes)

    @property
    def granule(self) -> int:
        """Tokens of one hardware tile: the least that can be written (32-byte sublane packing)."""
        return min(self.spec.page_size, SUBLANES * 4 // np.dtype(self.spec.dtype).itemsize)


def layout_of(spec: KVCacheSpec) -> Layout:
    """Layout of `spec`. ValueError names what is wrong; NotImplementedError what is not done here."""
    check_spec(spec)
    name = np.dtype(spec.dtype).name
    if name not in KV_DTYPES:
        raise NotImplementedError(
            f"KVCacheSpec.dtype={name}: the TPU kernels take {', '.join(KV_DTYPES)}"
        )
    if spec.page_size % 16 or spec.page_size & (spec.page_size - 1) or spec.page_size > 256:
        raise NotImplementedError(
            f"KVCacheSpec.page_size={spec.page_size}: the TPU kernels take 16, 32, 64, 128 or 256"
        )
    if spec.head_dim > 256:
        raise NotImplementedError(
            f"KVCacheSpec.head_dim={spec.head_dim}: the TPU kernels take at most 256"
        )
    packed = spec.head_dim <= LANES // 2
    lanes = LANES if packed else -(-spec.head_dim // LANES) * LANES
    return Layout(spec, packed, lanes)


def pack_kv(
    k: Num[Array, "... D"], v: Num[Array, "... D"], layout: Layout
) -> Num[Array, "... C L"]:
    """Rows of keys and values as they are stored, padded with zeros."""
    pad = [(0, 0)] * (k.ndim - 1)
    if layout.packed:
        half = [*pad, (0, LANES // 2 - k.shape[-1])]
        row = jnp.concatenate([jnp.pad(k, half), jnp.pad(v, half)], axis=-1)
        return row[..., None, :]
    wide = [*pad, (0, layout.lanes - k.shape[-1])]
    return jnp.stack([jnp.pad(k, wide), jnp.pad(v, wide)], axis=-2)


def pages_from_logical(
    logical: Shaped[Array, "N S 2 H D"], layout: Layout
) -> Shaped[Array, "N H C S L"]:
    """Pages in the physical layout."""
    rows = pack_kv(logical[:, :, 0], logical[:, :, 1], layout)  # [N, S, H, C, L]
    return jnp.transpose(rows, (0, 2, 3, 1, 4)).astype(layout.spec.dtype)


def pages_to_logical(
    pages: Shaped[Array, "N H C S L"], layout: Layout
) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `pages_from_logical`."""
    size, start = layout.spec.head_dim, layout.value_lane
    key, value = pages[:, :, 0, :, :size], pages[:, :, -1, :, start : start + size]
    return jnp.transpose(jnp.stack([key, value], axis=1), (0, 3, 1, 2, 4))


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """How query heads share vector registers of 8 sublanes in the decode kernel.

    Query heads of one KV head are padded to `q_per_kv`, a power of two or a multiple of 8; the
    heads of `heads` KV heads fill one register, so that softmax wastes no sublanes: their scores
    come from `heads` products, of which a select keeps each head's own rows.
    """

    q_per_kv: int
    heads: int
    count: int

    @property
    def rows(self) -> int:
        return self.q_per_kv * self.heads


def head_groups(num_q_heads: int, num_kv_heads: int) -> HeadGroups:
    """Groups for `num_q_heads` query heads over `num_kv_heads` KV heads."""
    q_per_kv = num_q_heads // num_kv_heads
    padded = -(-q_per_kv // SUBLANES) * SUBLANES
    for size in (1, 2, 4):
        if q_per_kv <= size:
            padded = size
            break
    heads = max(SUBLANES // padded, 1)
    while num_kv_heads % heads:
        heads //= 2
    return HeadGroups(padded, heads, num_kv_heads // heads)


def pad_queries(
    q: Num[Array, "T Hq D"], num_kv_heads: int, q_per_kv: int, lanes: int
) -> Num[Array, "T H G L"]:
    """Queries by KV head, padded with zeros to `q_per_kv` heads and `lanes` lanes."""
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, num_kv_heads, heads // num_kv_heads, head_dim)
    pad = ((0, 0), (0, 0), (0, q_per_kv - grouped.shape[2]), (0, lanes - head_dim))
    return jnp.pad(grouped, pad)
