"""Fills a model from named tensors, one at a time, after checking that every one is there and fits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.layers import PROJECTION_AXES, Embedding, RMSNorm, fuse_columns
from models.linear import Linear, Quantization
from models.transformer import Transformer

# Sharding of a parameter, from its logical axes; None leaves it where JAX puts it.
ShardingOf = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]
Leaf = Linear | Embedding | RMSNorm


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, as [out, in] for matrices."""

    @property
    def label(self) -> str:
        """What to call the source in messages."""
        ...

    def names(self) -> Collection[str]:
        """Every tensor there is."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def own_name(self, name: str) -> str:
        """What the source itself calls a tensor, for messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, in any float dtype."""
        ...


# Our modules of a layer -> Hugging Face's, fused ones in order.
_LAYER_NAMES = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.o": ("self_attn.o_proj",),
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_TOP_NAMES = {"embedding": "model.embed_tokens", "lm_head": "lm_head", "final_norm": "model.norm"}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this shape must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key, value = config.qkv_sizes
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for part, size in (("q", query), ("k", key), ("v", value)):
            shapes[prefix + f"self_attn.{part}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[prefix + f"self_attn.{part}_proj.bias"] = (size,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _ignorable(name: str, config: ModelConfig) -> bool:
    # Buffers of old checkpoints, and the second copy that some tied checkpoints carry.
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_embeddings
    )


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """Raises ModelLoadError unless the source has exactly the tensors of the config."""
    expected = expected_tensors(config)
    present = set(source.names())
    missing = [name for name in expected if name not in present]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelLoadError(f"{source.label} lacks the tensor {source.own_name(missing[0])}{more}")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise ModelLoadError(
                f"{source.label}: tensor {source.own_name(name)} has shape {tuple(source.shape(name))} where the "
                f"config says {shape}"
            )
    unknown = sorted(n for n in present if n not in expected and not _ignorable(n, config))
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ModelLoadError(
            f"{source.label} has the tensor {source.own_name(unknown[0])}{more}, which a {config.family} model of "
            "this config has no place for"
        )


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    *,
    shards: int = 1,
    **settings,
) -> Transformer:
    """Builds the model from named tensors. `settings` as in `build_model`.

    Raises:
      ModelLoadError: a tensor is missing, misshapen, unexpected or unreadable.
    """
    check_tensors(source, config)

    def fill(modules: dict[str, Leaf]) -> None:
        for path, module in modules.items():
            names = _hugging_face_names(path)
            weights = [source.read(name + ".weight") for name in names]
            if not isinstance(module, Linear):
                module.load(weights[0])
                continue
            bias = None
            if module.bias is not None:
                bias = fuse_columns([source.read(name + ".bias") for name in names], shards)
            module.load(fuse_columns([weight.T for weight in weights], shards), bias)

    return build_model(config, fill, shards=shards, **settings)


def build_model(
    config: ModelConfig,
    fill: Callable[[dict[str, Leaf]], None],
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    shards: int = 1,
    sharding_of: ShardingOf | None = None,
    progress: bool = True,
) -> Transformer:
    """Builds a model group by group (`leaf_modules`), so that little beside it is in memory.

    Args:
      config: shape of the model.
      fill: called with the modules of one group by their paths; loads each of them.
      dtype, quantization, shards: as in `Transformer`.
      sharding_of: where each parameter goes once it is filled.
      progress: show a progress bar.
    """
    model = Transformer.abstract(config, dtype=dtype, quantization=quantization, shards=shards)
    groups = leaf_modules(model)
    for modules in tqdm(
        groups.values(), desc="Loading weights", unit="part", disable=not progress, leave=False
    ):
        fill(modules)
        for module in modules.values():
            if sharding_of is not None:
                _place(module, sharding_of)
            # Wait, so that copies in flight do not pile up in memory.
            jax.block_until_ready(jax.tree.leaves(nnx.state(module)))
    return model


def leaf_modules(model: Transformer) -> dict[str, dict[str, Leaf]]:
    """Modules that own parameters: group -> path -> module.

    Groups are "embedding", "lm_head" unless tied, "layers.0" and so on, and "final_norm"; a path
    starts with its group. The largest tables come first, while nothing else is in memory.
    """
    groups: dict[str, dict[str, Leaf]] = {"embedding": {"embedding": model.embedding}}
    if model.lm_head is not None:
        groups["lm_head"] = {"lm_head": model.lm_head}
    for index, layer in enumerate(model.layers):
        group = f"layers.{index}"
        modules = {}
        for path in _LAYER_NAMES:
            module = layer
            for part in path.split("."):
                module = getattr(module, part, None)
            if module is not None:
                modules[f"{group}.{path}"] = module
        groups[group] = modules
    groups["final_norm"] = {"final_norm": model.final_norm}
    return groups


def logical_shape(module: Leaf) -> tuple[int, ...]:
    """Shape of what `module.load` takes as its weight."""
    if isinstance(module, Linear):
        return module.in_features, module.out_features
    if isinstance(module, Embedding):
        return module.vocab_size, module.hidden_size
    return tuple(module.weight.shape)


def logical_axes(path: str, module: Leaf) -> tuple[str | None, ...]:
    """Names of the axes of `logical_shape`."""
    if isinstance(module, Linear):
        return PROJECTION_AXES[path.rsplit(".", 1)[-1]]
    return ("vocab", "embed") if isinstance(module, Embedding) else module.weight.axes


def _hugging_face_names(path: str) -> list[str]:
    if path in _TOP_NAMES:
        return [_TOP_NAMES[path]]
    _, layer, rest = path.split(".", 2)
    return [f"model.layers.{layer}.{name}" for name in _LAYER_NAMES[rest]]


def _place(module: nnx.Module, sharding_of: ShardingOf) -> None:
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            param.set_value(jax.device_put(param[...], sharding_of(param.axes)))


class RandomSource:
    """Random tensors of a config's shape, for benchmarks and tests: uniform, deviation 0.02."""

    label = "random weights"

    def __init__(self, config: ModelConfig, seed: int):
        """The same seed gives the same tensors, whatever the order in which they are read."""
        self._shapes = expected_tensors(config)
        self._seed = seed

    def names(self) -> Collection[str]:
        """Every tensor of the config."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def own_name(self, name: str) -> str:
        """The same."""
        return name

    def read(self, name: str) -> np.ndarray:
        """float32; norms are ones."""
        if name.endswith("norm.weight"):
            return np.ones(self._shapes[name], np.float32)
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = rng.random(self._shapes[name], np.float32)
        values -= 0.5
        values *= 0.02 * math.sqrt(12)
        return values
