"""Builds and loads the C++ kernels for CPUs, where a compiler is at hand.

The sources in `cpu_kernels/` are compiled for this very machine (-march=native) on first use, into
the user's cache folder. Nothing depends on them: without a compiler, and on meshes of several CPU
devices, plain JAX does the work. `set_mode` (or the environment variable TIDEGATE_CPU_KERNELS)
chooses: "auto", "xla" (never native) or "native" (an error where they cannot be had).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import version
from typing import Literal

import jax

logger = logging.getLogger(__name__)

Mode = Literal["auto", "xla", "native"]
MODES = ("auto", "xla", "native")
ENVIRONMENT_VARIABLE = "TIDEGATE_CPU_KERNELS"

_SOURCES = pathlib.Path(__file__).with_name("cpu_kernels")
_HANDLERS = ("matmul", "attend", "attention", "kv_write")
_COMPILER_FLAGS = ("-O2", "-march=native", "-std=c++17", "-fPIC", "-Wno-psabi")
_TIMEOUT_S = 300

_mode: str | None = None


def set_mode(mode: Mode) -> None:
    """Chooses the CPU kernels of layers and caches made from now on. Raises ValueError."""
    global _mode
    if mode not in MODES:
        raise ValueError(f"cpu_kernels={mode!r} is not one of: {', '.join(MODES)}")
    _mode = mode


def get_mode() -> str:
    """The mode set, else the environment's, else "auto". Raises ValueError."""
    mode = _mode or os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if mode not in MODES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={mode} is not one of: {', '.join(MODES)}")
    return mode


def available() -> bool:
    """Whether the native kernels are to be used. Builds and loads them on the first call.

    Raises RuntimeError in mode "native" where they cannot be had, with the reason.
    """
    mode = get_mode()
    if mode == "xla":
        return False
    if jax.default_backend() != "cpu":
        reason = f"JAX runs on {jax.default_backend()}, not on a CPU"
    elif jax.device_count() > 1:
        reason = f"JAX has {jax.device_count()} CPU devices, over which they cannot be partitioned"
    else:
        reason = _library().problem
    if reason and mode == "native":
        raise RuntimeError(f"native CPU kernels are not available: {reason}; use cpu_kernels=auto")
    return reason is None


def target(handler: str) -> str:
    """Name under which XLA knows a handler; it changes with the sources, as programs are cached."""
    return f"tidegate_{handler}_{_library().key}"


class _Library:
    """The loaded library, or why there is none."""

    def __init__(self, key: str, problem: str | None):
        self.key, self.problem = key, problem


@functools.cache
def _library() -> _Library:
    key = _key()
    try:
        path = _build(key)
        library = ctypes.cdll.LoadLibrary(str(path))
        for handler in _HANDLERS:
            capsule = jax.ffi.pycapsule(getattr(library, f"tidegate_{handler}"))
            jax.ffi.register_ffi_target(f"tidegate_{handler}_{key}", capsule, platform="cpu")
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        if output:
            logger.warning("The compiler's output:\n%s", output[-4000:])
        problem = str(error)
        logger.warning("CPU kernels are plain XLA, several times slower: %s", problem)
        return _Library(key, problem)
    return _Library(key, None)


def _key() -> str:
    """Changes with whatever the compiled library depends on."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    for text in (*_COMPILER_FLAGS, version("jaxlib"), platform.machine(), _cpu_description()):
        digest.update(text.encode())
    return digest.hexdigest()


def _cpu_description() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(key: str) -> pathlib.Path:
    """Path of the compiled library. Raises OSError or SubprocessError."""
    name = f"cpu_kernels-{key}.so"
    folder = _cache_folder()
    if folder is not None and (folder / name).exists():
        return folder / name
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise OSError("no C++ compiler was found (install g++, or set CXX)")
    started = time.monotonic()
    keep = folder or pathlib.Path(tempfile.mkdtemp(prefix="tidegate-"))
    with tempfile.TemporaryDirectory(dir=keep) as scratch:
        sources = sorted(_SOURCES.glob("*.cc"))
        objects = [pathlib.Path(scratch, source.stem + ".o") for source in sources]
        include = f"-isystem{jax.ffi.include_dir()}"
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(
                pool.map(
                    lambda pair: _run(
                        [
                            compiler,
                            *_COMPILER_FLAGS,
                            include,
                            "-c",
                            str(pair[0]),
                            "-o",
                            str(pair[1]),
                        ]
                    ),
                    zip(sources, objects, strict=True),
                )
            )
        library = pathlib.Path(scratch, name)
        _run([compiler, "-shared", *map(str, objects), "-o", str(library)])
        os.replace(library, keep / name)  # at once: another process may be doing the same
    logger.info("Compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, keep / name)
    return keep / name


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _cache_folder() -> pathlib.Path | None:
    """The user's cache folder; None where it cannot be written or is not the user's own."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "tidegate"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        mine = folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return None
    return folder if mine else None
