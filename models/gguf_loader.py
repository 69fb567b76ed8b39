"""Llama-type models from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.gguf_file import GGUFFile


def read_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file, tokenizer arrays included, as plain Python values.

    Raises ModelLoadError if the file is not sound GGUF, OSError if it cannot be read.
    """
    return GGUFFile(path).metadata
