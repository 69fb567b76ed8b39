"""The package stands alone: standard library and numpy, nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import scheduler


def test_import_loads_no_device_library():
    code = (
        "import sys, scheduler\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "bad = names & {'jax', 'jaxlib', 'flax', 'torch', 'engine', 'models', 'pallas_kernels'}\n"
        "print(sorted(bad))\n"
    )
    root = Path(scheduler.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


def test_everything_exported_exists():
    for name in scheduler.__all__:
        assert hasattr(scheduler, name)
