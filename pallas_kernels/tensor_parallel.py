"""Attention over KV heads that are split over the devices of a mesh axis.

A Pallas kernel cannot be partitioned by the compiler, so each device runs it on its own heads:
queries, keys, values and pages are split by head, the batch is the same everywhere, and nothing
is communicated. With fewer KV heads than devices the pages hold copies: see `pool_kv_heads`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_types import KVCacheSpec


@dataclasses.dataclass(frozen=True)
class HeadAxis:
    """The mesh axis over which heads are split."""

    mesh: Mesh | AbstractMesh
    name: str

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]


_axis: contextvars.ContextVar[HeadAxis | None] = contextvars.ContextVar("head_axis", default=None)


@contextlib.contextmanager
def _set(axis: HeadAxis | None) -> Iterator[None]:
    token = _axis.set(axis)
    try:
        yield
    finally:
        _axis.reset(token)


def split_heads(mesh: Mesh | AbstractMesh, axis: str) -> contextlib.AbstractContextManager[None]:
    """Kernels traced inside split their heads over `axis` of `mesh`."""
    return _set(HeadAxis(mesh, axis))


def no_split() -> contextlib.AbstractContextManager[None]:
    """Kernels traced inside run on the heads they are given."""
    return _set(None)


def head_axis() -> HeadAxis | None:
    """The axis set by `split_heads`, or None."""
    return _axis.get()


def pool_kv_heads(num_kv_heads: int, devices: int) -> int:
    """KV heads that the pages must hold: as many as devices where there are fewer.

    With fewer KV heads than devices, each is repeated (jnp.repeat over the head axis of k and v)
    so that every device holds the one its query heads read. Raises ValueError where neither
    number divides the other.
    """
    if num_kv_heads % devices == 0:
        return num_kv_heads
    if devices % num_kv_heads == 0:
        return devices
    raise ValueError(
        f"{num_kv_heads} KV heads cannot be split over {devices} devices, nor repeated evenly"
    )


def local_spec(spec: KVCacheSpec, axis: HeadAxis) -> KVCacheSpec:
    """Pages of one device. Raises ValueError unless the devices share the heads evenly."""
    if spec.num_kv_heads % axis.size:
        raise ValueError(
            f"KVCacheSpec.num_kv_heads={spec.num_kv_heads} does not divide over {axis.size} "
            "devices; see tensor_parallel.pool_kv_heads"
        )
    return dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // axis.size)


def by_heads(
    function: Callable[..., Any],
    axis: HeadAxis,
    arrays: dict[str, Any],
    *,
    replicated: tuple[str, ...],
    head_position: dict[str, int],
    out_positions: Any,
) -> Any:
    """Calls function(**local arrays) on every device.

    Args:
      arrays: by name; None stays None.
      replicated: names of arrays that every device sees whole.
      head_position: for each other name, which of its dimensions counts heads.
      out_positions: pytree of the outputs' head dimensions.
    """

    def spec(position: int) -> P:
        return P(*[None] * position, axis.name)

    present = {name: x for name, x in arrays.items() if x is not None}
    specs = {
        name: jax.tree.map(lambda _: P(), x) if name in replicated else spec(head_position[name])
        for name, x in present.items()
    }
    absent = dict.fromkeys(set(arrays) - set(present))
    return jax.shard_map(
        lambda local: function(**local, **absent),
        mesh=axis.mesh,
        in_specs=(specs,),
        out_specs=jax.tree.map(spec, out_positions),
        check_vma=False,
    )(present)
