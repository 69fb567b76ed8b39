"""Tensors of a Hugging Face folder, read from its safetensors files one at a time.

Format: eight bytes of header length, a JSON header with dtype, shape and byte range of each
tensor, then the data (github.com/huggingface/safetensors). Tensors are read rather than mapped:
pages of a mapped file stay in the process's resident set, which would double the memory of a load.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.errors import ModelLoadError
from models.hf_config import read_json

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16)}
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def _read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor of one file. Raises ModelLoadError if the file is truncated or corrupt."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelLoadError(f"{path} is truncated or no safetensors file: no whole header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(path, 8 + length, value) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{path} is corrupt: its header cannot be parsed") from error
    for name, entry in entries.items():
        if entry.offset + entry.num_bytes > size:
            raise ModelLoadError(
                f"{path} is truncated: tensor {name} ends at byte "
                f"{entry.offset + entry.num_bytes} but the file has {size}"
            )
    return entries


def _entry(path: Path, start: int, value: dict[str, Any]) -> _Entry:
    first, end = value["data_offsets"]
    shape = tuple(int(n) for n in value["shape"])
    if first < 0 or end < first or any(n < 0 for n in shape):
        raise ValueError
    return _Entry(path, value["dtype"], shape, start + first, end - first)


class SafetensorsSource:
    """The tensors of a folder, whichever files they lie in."""

    def __init__(self, folder: Path):
        """Reads all headers. Raises ModelLoadError if files are missing, truncated or corrupt."""
        self.label = str(folder)
        self._entries: dict[str, _Entry] = {}
        index = folder / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelLoadError(f"{index} has no weight_map")
            self._read_shards(folder, weight_map)
            return
        path = folder / "model.safetensors"
        if not path.is_file():
            found = sorted(p.name for p in folder.glob("*.safetensors"))
            raise ModelLoadError(
                f"{folder} has neither model.safetensors nor {INDEX}"
                + (f" (found {', '.join(found)})" if found else "")
            )
        self._entries = _read_header(path)

    def _read_shards(self, folder: Path, weight_map: dict[str, str]) -> None:
        headers = {}
        for name, file in weight_map.items():
            path = folder / file
            if path.parent != folder or not path.is_file():
                raise ModelLoadError(f"{folder / INDEX} names {file}, which is not in {folder}")
            if file not in headers:
                headers[file] = _read_header(path)
            if name not in headers[file]:
                raise ModelLoadError(f"{path} lacks the tensor {name} that {INDEX} places there")
            self._entries[name] = headers[file][name]

    def names(self) -> Collection[str]:
        """Every tensor of the folder."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def own_name(self, name: str) -> str:
        """The same."""
        return name

    def read(self, name: str) -> np.ndarray:
        """The tensor in the file's dtype. Raises ModelLoadError if that is not a float type."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelLoadError(
                f"{entry.path}: tensor {name} has the unsupported dtype {entry.dtype} "
                f"(supported: {', '.join(_DTYPES)})"
            )
        if math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
            raise ModelLoadError(
                f"{entry.path} is corrupt: tensor {name} of shape {entry.shape} and dtype "
                f"{entry.dtype} does not fill {entry.num_bytes} bytes"
            )
        data = np.fromfile(entry.path, np.uint8, entry.num_bytes, offset=entry.offset)
        return data.view(dtype).reshape(entry.shape)
