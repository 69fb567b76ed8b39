"""Reads GGUF files: metadata and tensor directory in one pass, tensor data as views of the file.

Format: the GGUF specification in ggml's docs/gguf.md, versions 2 and 3, little-endian. The
`gguf` package's own reader builds a numpy view per string of the vocabulary, which takes seconds;
here the header is walked once, in tens of milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelLoadError

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor directory.

    Attributes:
      name: as in the file.
      shape: in numpy's order, slowest axis first (the file has them reversed).
      type_id: value of `gguf.GGMLQuantizationType`.
      offset: byte position in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """A GGUF file: its header in memory, its tensors read when asked for.

    Attributes:
      path: of the file.
      metadata: key -> int, float, bool, str or (nested) list of those.
      tensors: name -> directory entry, in file order.
    """

    def __init__(self, path: str | Path):
        """Reads the header. Raises ModelLoadError if it is not sound GGUF, OSError if unreadable."""
        self.path = Path(path)
        with open(self.path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(
                    f"{self.path} is not a GGUF file (it does not start with GGUF)"
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self._map)
        self._pos = 4
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise ModelLoadError(
                f"{self.path} is truncated or corrupt: its header cannot be read past byte "
                f"{min(self._pos, self._size)}"
            ) from error
        finally:
            self._map.close()

    def _read_header(self) -> None:
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise ModelLoadError(
                f"{self.path} has GGUF version {version}; versions 2 and 3, little-endian, can be read"
            )
        num_tensors, num_keys = self._unpack("<QQ")
        self._check_count(num_tensors, 24)
        self._check_count(num_keys, 13)
        for _ in range(num_keys):
            key = self._string()
            (kind,) = self._unpack("<I")
            self.metadata[key] = self._value(kind, 0)
        self._metadata_end = self._pos
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelLoadError(f"{self.path} has general.alignment={alignment!r}")
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("<I")
            if num_dims > _MAX_DIMS:
                raise ModelLoadError(f"{self.path}: tensor {name} has {num_dims} dimensions")
            shape = tuple(reversed(self._unpack(f"<{num_dims}Q")))
            type_id, offset = self._unpack("<IQ")
            entries.append((name, shape, type_id, offset))
        start = -(-self._pos // alignment) * alignment
        for name, shape, type_id, offset in entries:
            if name in self.tensors:
                raise ModelLoadError(f"{self.path}: tensor {name} appears twice")
            self.tensors[name] = GGUFTensor(name, shape, type_id, start + offset)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._map, self._pos)
        self._pos += struct.calcsize(layout)
        return values

    def _check_count(self, count: int, least_bytes: int) -> None:
        # A corrupt count must not make us loop, or allocate, for ever.
        if count * least_bytes > self._size - self._pos:
            raise IndexError

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        self._check_count(count, 8)
        data, pos, result = self._map, self._pos, []
        for _ in range(count):
            start = pos + 8
            pos = start + int.from_bytes(data[pos:start], "little")
            result.append(data[start:pos].decode())
        if pos > len(data):
            raise IndexError
        self._pos = pos
        return result

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        element, count = self._unpack("<IQ")
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            if depth == _MAX_ARRAY_DEPTH:
                raise IndexError
            self._check_count(count, 12)
            return [self._value(_ARRAY, depth + 1) for _ in range(count)]
        return self._scalars(element, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise IndexError
        dtype = np.dtype(_SCALARS[kind])
        self._check_count(count, dtype.itemsize)
        values = np.frombuffer(self._map, dtype, count, self._pos).tolist()
        self._pos += count * dtype.itemsize
        return values

    def write_metadata(self, path: Path) -> None:
        """Writes a GGUF file with this one's metadata and no tensors."""
        with open(self.path, "rb") as file:
            header = bytearray(file.read(self._metadata_end))
        header[8:16] = bytes(8)  # the number of tensors
        path.write_bytes(header)

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor dequantised to float32, a fresh array in `shape`.

        Raises ModelLoadError if its type is unknown or the file ends before it does.
        """
        import gguf

        tensor = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has the unsupported quantisation type {tensor.type_id}"
            ) from error
        size = math.prod(tensor.shape)
        if not tensor.shape or tensor.shape[-1] % block:
            raise ModelLoadError(
                f"{self.path}: tensor {name} of shape {tensor.shape} cannot be of type {kind.name}"
            )
        num_bytes = size // block * block_bytes
        if tensor.offset + num_bytes > self._size:
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name} ends at byte "
                f"{tensor.offset + num_bytes} but the file has {self._size}"
            )
        # Read, not mapped: pages of a mapped file stay in the process's resident set.
        data = np.fromfile(self.path, np.uint8, num_bytes, offset=tensor.offset)
        if kind == gguf.GGMLQuantizationType.F32:
            return data.view("<f4").reshape(tensor.shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return data.view("<f2").reshape(tensor.shape).astype(np.float32)
        # gguf works on 16 rows at a time: rows of up to 128 blocks keep it in the cache and busy.
        rows = data.reshape(-1, math.gcd(size // block, 128) * block_bytes)
        try:
            return gguf.dequantize(rows, kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has the unsupported quantisation type {kind.name}"
            ) from error
