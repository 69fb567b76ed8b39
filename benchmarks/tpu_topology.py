"""TPU topologies to compile for on a machine without a TPU."""

from __future__ import annotations

import importlib
import math
import os
import re
from typing import Any

import jax
import numpy as np

_NAME = re.compile(r"^(v4|v5e|v5p|v6e|tpu7x|7x):(\d+(?:x\d+)*)$")
# Smallest slice libtpu describes; a smaller request takes the first devices of it.
_LEAST = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}


def topology_devices(name: str) -> list[Any]:
    """Devices of a topology such as "v6e:1x1", "v5e:2x2" or "tpu7x:1x1x1".

    Raises ValueError for a name of another form and RuntimeError without libtpu.
    """
    match = _NAME.match(name)
    if not match:
        raise ValueError(
            f"--topology={name} is not of the form v5e:2x2 (v4, v5e, v5p, v6e or tpu7x, and a shape)"
        )
    chip = "tpu7x" if match[1] == "7x" else match[1]
    shape = [int(n) for n in match[2].split("x")]
    least = [int(n) for n in _LEAST[chip].split("x")]
    count = math.prod(shape)
    # A process of another program may hold the lock of a TPU that does not exist here.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    shown = "x".join(map(str, shape)) if count >= math.prod(least) else _LEAST[chip]
    try:
        importlib.import_module("libtpu")
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{shown}")
    except ImportError as error:
        raise RuntimeError(
            "compiling for a TPU needs libtpu: pip install 'tidegate[tpu]'"
        ) from error
    cores = len(topology.devices) // math.prod(int(n) for n in shown.split("x"))
    return list(topology.devices[: count * cores])


def device_mesh(devices: list[Any], axis: str = "tp") -> jax.sharding.Mesh:
    """A mesh of one axis over `devices`."""
    return jax.sharding.Mesh(np.array(devices), (axis,))
