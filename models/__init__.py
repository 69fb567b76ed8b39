"""Model families on one decoder stack, and every way that weights come in."""

from models.config import ModelConfig, RopeScaling
from models.errors import ModelLoadError
from models.loading import LoadedModel, load_model, resolve_dtype
from models.transformer import Transformer

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "ModelLoadError",
    "RopeScaling",
    "Transformer",
    "load_model",
    "resolve_dtype",
]
