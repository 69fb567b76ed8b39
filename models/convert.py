"""Writes any model that can be loaded as an Orbax checkpoint.

python -m models.convert SOURCE DESTINATION [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from models import orbax_io
from models.errors import ModelLoadError
from models.loading import load_model


def convert(
    source: str | Path | None,
    destination: str | Path,
    *,
    dtype: str = "auto",
    progress: bool = True,
) -> Path:
    """Writes a checkpoint that `load_model` reads; it appears whole or not at all.

    Args:
      source: as for `load_model`.
      destination: a folder that does not exist yet.
      dtype: of the stored weights; "auto" keeps the source's.
      progress: show progress bars.

    Raises:
      ModelLoadError: the source cannot be loaded, or the destination exists.
      OSError: the destination cannot be written.
    """
    folder = Path(destination)
    if folder.exists():
        raise ModelLoadError(f"{folder} exists already; name a new folder as DESTINATION")
    loaded = load_model(source, dtype=dtype, progress=progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        orbax_io.save(loaded.model, temporary, progress=progress)
        orbax_io.copy_tokenizer(loaded.tokenizer_source, temporary)
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.convert", description=__doc__)
    parser.add_argument("source", help="Hugging Face folder, GGUF file or hub name")
    parser.add_argument("destination", help="folder to write, which must not exist")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    args = parser.parse_args(argv)
    try:
        folder = convert(args.source, args.destination, dtype=args.dtype)
    except (ModelLoadError, OSError) as error:
        print(f"models.convert: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
