"""JAX's persistent compilation cache, in the user's cache folder unless told otherwise."""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile

import jax

logger = logging.getLogger(__name__)


def default_cache_dir() -> pathlib.Path:
    """The user's cache folder for this engine (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tidegate"


def enable_compile_cache(folder: str | None) -> pathlib.Path | None:
    """Turns the persistent cache on; returns its folder, or None where it is off.

    Args:
      folder: None is `default_cache_dir()/xla`, "" turns the cache off.

    A folder that cannot be written costs a warning and the cache, not the start. JAX itself reads
    a corrupt entry as a miss.
    """
    if folder == "":
        return None
    path = pathlib.Path(folder) if folder else default_cache_dir() / "xla"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        logger.warning(
            "Compile cache %s cannot be written (%s); programs are compiled anew at each start. "
            "Change --compile_cache_dir.",
            path,
            error.strerror,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_raise_persistent_cache_errors", False)
    return path


class CompileCounter:
    """Counts XLA compilations in this process from its creation on (cache hits are none)."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self._EVENT:
            self.count += 1
