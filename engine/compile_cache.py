"""The folder where compiled steps are kept between starts, and a counter of compilations."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)


def default_cache_dir() -> pathlib.Path:
    """The user's cache folder for this engine (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tidegate"


def prepare_cache_dir(folder: str | None) -> pathlib.Path | None:
    """Makes the folder of compiled steps; returns it, or None where it is off.

    Args:
      folder: None is `default_cache_dir()/steps`, "" turns the cache off.

    A folder that cannot be written costs a warning and the cache, not the start.
    """
    if folder == "":
        return None
    path = pathlib.Path(folder) if folder else default_cache_dir() / "steps"
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
    return path


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Compiles afresh even where JAX's own persistent cache is on.

    On CPU an executable that came out of that cache cannot be serialised again: it loads, and
    fails when it runs.
    """
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


class CompileCounter:
    """Counts XLA compilations in this process from its creation on."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self._EVENT:
            self.count += 1
