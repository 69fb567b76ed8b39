"""Checkpoints in Orbax format: what `python -m models.convert` writes.

A checkpoint is a folder:

  model_config.json  the `ModelConfig`, a format version and the dtype
  params/            Orbax PyTree {group: {"path.weight" or "path.bias": array}}, see
                     `models.weights.leaf_modules`; matrices are logical, [in, out], fused
                     with one shard, and not quantised
  tokenizer files    copied from the source (tokenizer.gguf holds the metadata of a GGUF source)

Restoring goes group by group straight into the target dtype and sharding.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from models.config import ModelConfig, RopeScaling
from models.errors import ModelLoadError
from models.gguf_file import GGUFFile
from models.hf_config import read_json
from models.layers import fuse_columns
from models.linear import Linear
from models.transformer import Transformer
from models.weights import (
    Leaf,
    ShardingOf,
    build_model,
    leaf_modules,
    logical_axes,
    logical_shape,
)

CONFIG_FILE = "model_config.json"
_PARAMS = "params"
_VERSION = 1


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder was written by `save`."""
    return (folder / CONFIG_FILE).is_file()


def save(model: Transformer, folder: Path, *, progress: bool = True) -> None:
    """Writes config and parameters into an existing, empty folder."""
    import orbax.checkpoint as ocp

    if model.shards != 1:
        raise ValueError(
            f"a model with shards={model.shards} cannot be saved; load it with shards=1"
        )
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = {
            group: {
                f"{path}.{name}": value
                for path, module in modules.items()
                for name, value in _logical(module).items()
            }
            for group, modules in tqdm(
                leaf_modules(model).items(), desc="Gathering", disable=not progress, leave=False
            )
        }
        checkpointer.save(folder.absolute() / _PARAMS, tree)
    described = {
        "format": _VERSION,
        "dtype": str(model.embedding.dtype),
        "config": dataclasses.asdict(model.config),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n")


def _logical(module: Leaf) -> dict[str, jax.Array]:
    arrays = {"weight": module.logical()}
    if isinstance(module, Linear) and module.bias is not None:
        arrays["bias"] = module.bias[...]
    return arrays


def read_config(folder: Path) -> tuple[ModelConfig, str]:
    """Config and dtype of a checkpoint. Raises ModelLoadError if they do not make sense."""
    path = folder / CONFIG_FILE
    described = read_json(path)
    if described.get("format") != _VERSION:
        raise ModelLoadError(
            f"{path} has format {described.get('format')!r}; format {_VERSION} can be read"
        )
    try:
        fields = dict(described["config"])
        if fields["rope_scaling"] is not None:
            scaling = dict(fields["rope_scaling"])
            scaling["divisors"] = tuple(scaling["divisors"])
            fields["rope_scaling"] = RopeScaling(**scaling)
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return ModelConfig(**fields), str(described["dtype"])
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} is corrupt: {error}") from error


def load(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    shards: int = 1,
    sharding_of: ShardingOf | None = None,
    **settings: Any,
) -> Transformer:
    """Restores a checkpoint; `settings` as in `build_model`.

    Raises:
      ModelLoadError: a tensor is missing, misshapen, unexpected or unreadable.
    """
    import orbax.checkpoint as ocp

    path = folder.absolute() / _PARAMS
    with ocp.PyTreeCheckpointer() as checkpointer:
        shapes = _stored_shapes(checkpointer, path)
        _check(shapes, config, folder)
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def target(key: str, modules: dict[str, Leaf], shape: tuple[int, ...]) -> Any:
            module_path, name = key.rsplit(".", 1)
            axes = logical_axes(module_path, modules[module_path])
            axes = axes[-1:] if name == "bias" else axes
            sharding = default if sharding_of is None else sharding_of(axes)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

        def fill(modules: dict[str, Leaf]) -> None:
            group = _group(next(iter(modules)))
            tree = {
                group: {key: target(key, modules, shape) for key, shape in shapes[group].items()}
            }
            try:
                restored = checkpointer.restore(
                    path,
                    args=ocp.args.PyTreeRestore(
                        item=tree,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                        partial_restore=True,
                    ),
                )[group]
            except Exception as error:
                raise ModelLoadError(
                    f"{folder} is truncated or corrupt: tensors of {group} cannot be read "
                    f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
                ) from error
            for module_path, module in modules.items():
                weight = restored.pop(f"{module_path}.weight")
                if not isinstance(module, Linear):
                    module.load(weight)
                    continue
                bias = restored.pop(f"{module_path}.bias", None)
                if shards > 1 and module_path.endswith((".qkv", ".gate_up")):
                    order = _column_order(module_path, config, shards)
                    weight = weight[:, order]
                    bias = None if bias is None else bias[order]
                module.load(weight, bias)

        return build_model(
            config, fill, dtype=dtype, shards=shards, sharding_of=sharding_of, **settings
        )


def _group(path: str) -> str:
    return ".".join(path.split(".")[:2]) if path.startswith("layers.") else path


def _stored_shapes(checkpointer: Any, path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    try:
        metadata = checkpointer.metadata(path).item_metadata
        return {
            group: {key: tuple(array.shape) for key, array in arrays.items()}
            for group, arrays in metadata.tree.items()
        }
    except Exception as error:
        raise ModelLoadError(f"{path} is missing or no Orbax checkpoint") from error


def _check(
    shapes: dict[str, dict[str, tuple[int, ...]]], config: ModelConfig, folder: Path
) -> None:
    model = Transformer.abstract(config, dtype=jnp.float32)
    expected: dict[str, tuple[int, ...]] = {}
    for modules in leaf_modules(model).values():
        for path, module in modules.items():
            expected[f"{path}.weight"] = logical_shape(module)
            if isinstance(module, Linear) and module.bias is not None:
                expected[f"{path}.bias"] = (module.out_features,)
    stored = {key: shape for arrays in shapes.values() for key, shape in arrays.items()}
    for key, shape in expected.items():
        if key not in stored:
            raise ModelLoadError(f"{folder} lacks the tensor {key}")
        if stored[key] != shape:
            raise ModelLoadError(
                f"{folder}: tensor {key} has shape {stored[key]} where the config says {shape}"
            )
    unknown = sorted(stored.keys() - expected.keys())
    if unknown:
        raise ModelLoadError(
            f"{folder} has the tensor {unknown[0]}, which its config has no place for"
        )


def _column_order(path: str, config: ModelConfig, shards: int) -> np.ndarray:
    """Where each column of a fused weight for `shards` lies in the stored one."""
    sizes = config.qkv_sizes if path.endswith(".qkv") else (config.intermediate_size,) * 2
    columns = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return fuse_columns(columns, shards)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies what a tokenizer needs from a Hugging Face folder or a GGUF file into `folder`."""
    if source.is_file():
        GGUFFile(source).write_metadata(folder / "tokenizer.gguf")
        return
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model", ".gguf") and (
            path.name not in (CONFIG_FILE, "config.json")
            and not path.name.endswith(".index.json")
            and path.is_file()
        ):
            shutil.copyfile(path, folder / path.name)


def tokenizer_source(folder: Path) -> Path:
    """Where the tokenizer of a checkpoint lies."""
    metadata = folder / "tokenizer.gguf"
    return metadata if metadata.is_file() else folder
