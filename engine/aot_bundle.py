"""Compiled steps in one file, so that a start - here or on a machine alike - compiles nothing.

A bundle is a zip file: `manifest.json` names the environment and the program it was compiled for,
and each bucket is one entry. Loading runs code from the file (executables, and pickled tree
structures): a bundle is trusted input only, like any program one installs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import pickle
import platform
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

_MANIFEST = "manifest.json"


class BundleError(ValueError):
    """A bundle that cannot be used; one sentence."""


def environment() -> dict[str, str]:
    """What an executable depends on outside this project."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "device": f"{device.device_kind} x {jax.device_count()}",
        "machine": platform.machine(),
        "cpu": _cpu_features() if device.platform == "cpu" else "",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cpu_features() -> str:
    """A digest of the processor's instruction sets: XLA compiles for exactly these."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(x for x in lines if x.lower().startswith(("flags", "features")))
        features = " ".join(sorted(flags.split(":", 1)[1].split()))
    except (OSError, StopIteration):
        features = platform.processor()
    cores = os.cpu_count()
    return f"{hashlib.blake2b(features.encode(), digest_size=8).hexdigest()} with {cores} cores"


def source_digest(*folders: str) -> str:
    """A digest of this project's Python and C++ sources in the given packages."""
    root = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.blake2b(digest_size=16)
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write_bundle(path: pathlib.Path, program: str, executables: Mapping[str, Any]) -> None:
    """Writes a bundle whole or not at all.

    Args:
      path: where; its folder is made.
      program: fingerprint of what was compiled.
      executables: name of each bucket -> jax.stages.Compiled.

    Raises:
      OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {"environment": environment(), "program": program}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as bundle:
            bundle.writestr(_MANIFEST, json.dumps(manifest, indent=1))
            for key, compiled in executables.items():
                payload = pickle.dumps(serialize_executable.serialize(compiled))
                bundle.writestr(key, payload, zipfile.ZIP_DEFLATED, compresslevel=1)
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


class Bundle:
    """A bundle opened for reading, its fingerprints checked."""

    def __init__(self, path: pathlib.Path, program: str):
        """Raises BundleError where the file is damaged or was made for something else."""
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            manifest = json.loads(self._zip.read(_MANIFEST))
            made_for, made_of = dict(manifest["environment"]), manifest["program"]
        except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise BundleError(f"AOT bundle {path} cannot be read: {error}") from error
        for name, here in environment().items():
            if made_for.get(name) != here:
                raise BundleError(
                    f"AOT bundle {path} was compiled for {name} {made_for.get(name)!r}, but this "
                    f"is {here!r}; delete it or name another file with --aot_bundle"
                )
        if made_of != program:
            raise BundleError(
                f"AOT bundle {path} was compiled for another model, other limits or another "
                "version of this engine; delete it or name another file with --aot_bundle"
            )

    def load(self, key: str) -> Any:
        """The executable of a bucket. Raises BundleError where it is missing or damaged."""
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(self._zip.read(key)))
        except Exception as error:
            raise BundleError(f"AOT bundle {self.path}, entry {key}: {error}") from error
