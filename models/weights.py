"""Fills a model from named tensors, one at a time, after checking that every one is there and fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.layers import fuse_columns
from models.linear import Quantization
from models.transformer import Transformer

Place = Callable[[nnx.Module], None]


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

    def read(self, name: str) -> np.ndarray:
        """The tensor, in any float dtype; may be a view of a file."""
        ...


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
        raise ModelLoadError(f"{source.label} lacks the tensor {missing[0]}{more}")
    for name, shape in expected.items():
        if tuple(source.shape(name)) != shape:
            raise ModelLoadError(
                f"{source.label}: tensor {name} has shape {tuple(source.shape(name))} where the "
                f"config says {shape}"
            )
    unknown = sorted(n for n in present if n not in expected and not _ignorable(n, config))
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ModelLoadError(
            f"{source.label} has the tensor {unknown[0]}{more}, which a {config.family} model of "
            "this config has no place for"
        )


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    shards: int = 1,
    place: Place | None = None,
    progress: bool = True,
) -> Transformer:
    """Builds the model from a source, one matrix in host memory at a time.

    Args:
      config: shape of the model.
      source: read once per tensor.
      dtype, quantization, shards: as in `Transformer`.
      place: called with each module once it is filled, to move its parameters.
      progress: show a progress bar.

    Raises:
      ModelLoadError: a tensor is missing, misshapen, unexpected or unreadable.
    """
    check_tensors(source, config)
    model = Transformer.abstract(config, dtype=dtype, quantization=quantization, shards=shards)
    steps = list(_steps(model, source))
    for module, fill in tqdm(
        steps, desc="Loading weights", unit="tensor", disable=not progress, leave=False
    ):
        materialise(module)
        fill()
        if place is not None:
            place(module)
        # Wait, so that the copies in flight do not pile up in memory.
        jax.block_until_ready(jax.tree.leaves(nnx.state(module)))
    return model


def materialise(module: nnx.Module) -> None:
    """Gives abstract parameters zeros, so that they can be set."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.state(module))
    nnx.update(module, zeros)


def _steps(
    model: Transformer, source: TensorSource
) -> Iterator[tuple[nnx.Module, Callable[[], None]]]:
    """Every module that owns parameters, with the call that fills it."""

    def table(module, name):
        return module, lambda: module.load(source.read(name))

    def norm(module, name):
        def fill():
            module.weight[...] = jnp.asarray(source.read(name), module.weight.dtype)

        return module, fill

    def linear(module, *names):
        def fill():
            kernel = fuse_columns([source.read(n + ".weight").T for n in names], model.shards)
            bias = None
            if module.bias is not None:
                bias = fuse_columns([source.read(n + ".bias") for n in names], model.shards)
            module.load(kernel, bias)

        return module, fill

    yield table(model.embedding, "model.embed_tokens.weight")
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        yield norm(layer.input_norm, prefix + "input_layernorm.weight")
        yield norm(layer.post_attention_norm, prefix + "post_attention_layernorm.weight")
        yield linear(layer.attention.qkv, *(attention + f"{part}_proj" for part in "qkv"))
        if model.config.qk_norm:
            yield norm(layer.attention.q_norm, attention + "q_norm.weight")
            yield norm(layer.attention.k_norm, attention + "k_norm.weight")
        yield linear(layer.attention.o, attention + "o_proj")
        yield linear(layer.mlp.gate_up, prefix + "mlp.gate_proj", prefix + "mlp.up_proj")
        yield linear(layer.mlp.down, prefix + "mlp.down_proj")
    yield norm(model.final_norm, "model.norm.weight")
    if model.lm_head is not None:
        yield table(model.lm_head, "lm_head.weight")
