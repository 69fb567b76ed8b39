"""Checkpoints by hub name."""

from __future__ import annotations

import re
from pathlib import Path

from models.errors import ModelLoadError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]


def is_hub_name(source: str) -> bool:
    """Whether a string could name a model on the hub: owner/name."""
    return _NAME.fullmatch(source) is not None and not source.startswith(".")


def download(name: str, *, weights: bool = True) -> Path:
    """Folder of a hub model, downloaded unless it is in the local cache.

    Args:
      name: owner/name.
      weights: fetch the safetensors files too.

    Raises:
      ModelLoadError: the hub cannot be reached, or has no such model.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_TEXT, "model*.safetensors"] if weights else _TEXT
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached and the local cache does not have it"
        raise ModelLoadError(_sentence(name, reason)) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(_sentence(name, lines[0].rstrip("."))) from error


def _sentence(name: str, reason: str) -> str:
    return f"there is no path {name}, and it cannot be fetched from the Hugging Face hub: {reason}"
