"""Serves a model over OpenAI's HTTP API: `python run_server.py --model=... --watermark=0.05`.

Flags may be written with dashes or underscores, and as vLLM's users know them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from absl import flags

from engine.config import EngineConfig
from engine.server.argv import normalize_argv
from engine.server.config import ServerConfig
from engine.server.serve import serve
from engine.server.settings_help import field_help, field_kinds
from scheduler.config import SchedulerConfig

_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    tuple: flags.DEFINE_multi_string,
}


def define_flags(*classes: type) -> flags.FlagValues:
    """A flag for every field of the settings classes, whose defaults and texts they take over."""
    values = flags.FlagValues()
    texts: dict[str, str] = {}
    for settings in (*classes, SchedulerConfig):
        texts = field_help(settings) | texts
    for settings in classes:
        kinds = field_kinds(settings)
        for field in dataclasses.fields(settings):
            kind, default = kinds[field.name], field.default
            if default is not None and kind is str:
                default = str(default)
            elif isinstance(default, tuple):
                default = list(default)
            _DEFINE[kind](field.name, default, texts.get(field.name, ""), flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this text.", flag_values=values)
    return values


def parse(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Reads a command line (without the program's name). Raises flags.Error, ValueError."""
    booleans = {name for name in values if values[name].boolean}
    lists = {name for name in values if isinstance(values[name], flags.MultiFlag)}
    rest = values([sys.argv[0], *normalize_argv(argv, booleans, lists)])[1:]
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")


def fill(settings, values: flags.FlagValues):
    """A settings object from the flags of the same names."""
    fields = {field.name: values[field.name].value for field in dataclasses.fields(settings)}
    return settings(**{n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()})


def main(argv: Sequence[str]) -> int:
    """Runs the server with these arguments (without the program's name); returns the exit code."""
    values = define_flags(EngineConfig, ServerConfig)
    try:
        parse(argv, values)
        if values["help"].value:
            print((__doc__ or "").strip(), values.get_help(), sep="\n\n")
            return 0
        return serve(fill(EngineConfig, values), fill(ServerConfig, values))
    except (flags.Error, ValueError) as error:
        print(f"run_server.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
