"""Command lines as vLLM's users write them, in the spelling that absl's flags understand."""

from __future__ import annotations

from collections.abc import Collection, Sequence

ALIASES = {
    "scheduler_reserve_full_isl": "reserve_full_sequence",
    "num_gpu_blocks_override": "num_kv_blocks",
    "gpu_memory_utilization": "device_memory_utilization",
    "max_num_seq": "max_num_seqs",
    "uvicorn_log_level": "log_level",
    "disable_log_requests": "",
}


def normalize_argv(
    argv: Sequence[str], boolean_flags: Collection[str], list_flags: Collection[str] = ()
) -> list[str]:
    """Rewrites flags; values and everything after a lone "--" stay as they are.

    - dashes within a flag's name become underscores (--max-num-seqs),
    - vLLM's other names become ours (--gpu-memory-utilization),
    - --no-x and --no_x become --nox for boolean flags,
    - several values after a list flag become one flag each (--api-key a b),
    - a first argument without dashes is the model (`serve MODEL` as well).

    Args:
      argv: without the program's name.
      boolean_flags, list_flags: names of those kinds of flags.
    """
    result: list[str] = []
    arguments = list(argv)
    if arguments and arguments[0] == "serve":
        del arguments[0]
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--model={arguments[0]}"
    repeating: str | None = None
    fresh = False
    for position, argument in enumerate(arguments):
        if argument == "--":
            return result + arguments[position:]
        if not argument.startswith("-") or _is_number(argument):
            if repeating is not None and not fresh:
                result.append(f"--{repeating}")
            result.append(argument)
            fresh = False
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        bare = name.removeprefix("no_") if name.startswith("no_") else None
        if bare is not None and ALIASES.get(bare, bare) in boolean_flags:
            name = "no" + ALIASES.get(bare, bare)
        else:
            name = ALIASES.get(name, name)
        if not name:  # a switch of vLLM's that asks for what we do anyway
            continue
        repeating = name if name in list_flags and not equals else None
        fresh = repeating is not None
        result.append(f"--{name}{equals}{value}")
    return result


def _is_number(argument: str) -> bool:
    """A negative number is a value, not a flag."""
    try:
        float(argument)
    except ValueError:
        return False
    return True
