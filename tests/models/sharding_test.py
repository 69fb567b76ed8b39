"""Parameters go where their logical axes say, from every format."""

import os
import subprocess
import sys

from models import convert

CODE = """
import sys
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import load_model

mesh = Mesh(np.array(jax.devices()), ("x",))
def sharding_of(axes):
    return NamedSharding(mesh, PartitionSpec(*("x" if a in ("heads", "mlp") else None for a in axes)))

for path in sys.argv[1:]:
    model = load_model(path, shards=2, sharding_of=sharding_of, progress=False).model
    split = 0
    for name, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = param.get_value()
        assert len(array.sharding.device_set) == 2, name
        if any(a in ("heads", "mlp") for a in param.axes):
            assert array.addressable_shards[0].data.size * 2 == array.size, name
            split += 1
        else:
            assert array.is_fully_replicated, name
    assert split == 5 * 3
print("ok")
"""


def test_two_devices(fixtures, tmp_path):
    orbax = convert.convert(fixtures / "qwen2", tmp_path / "orbax", progress=False)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(fixtures / "qwen2"), str(orbax)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == "ok\n"
