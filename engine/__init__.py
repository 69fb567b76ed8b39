"""The engine: `from engine import LLM, SamplingParams`."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, RequestOutput
    from engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "engine.llm",
    "CompletionOutput": "engine.outputs",
    "EngineConfig": "engine.config",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
}


def _check_siblings() -> None:
    """Other distributions ship packages of these names; refuse to run on a mixture."""
    root = pathlib.Path(__file__).resolve().parent.parent
    for name in ("models", "pallas_kernels", "scheduler"):
        spec = importlib.util.find_spec(name)
        origin = pathlib.Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != root:
            raise ImportError(
                f"the package {name!r} comes from {origin}, not from beside {root / 'engine'}; "
                "remove the other one or put this folder first on the path"
            )


_check_siblings()


def __getattr__(name: str) -> Any:
    """Imports on first use, so that checking flags does not wait for jax."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
