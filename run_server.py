"""Serves a model over OpenAI's HTTP API: `python run_server.py --model=... --watermark=0.05`.

Flags may be written with dashes or underscores, and as vLLM's users know them.
"""

from __future__ import annotations

import dataclasses
import sys

from absl import flags

from engine.config import EngineConfig
from engine.server.argv import normalize_argv
from engine.server.config import ServerConfig
from engine.server.serve import serve
from engine.server.settings_help import field_help, field_kinds
from scheduler.config import SchedulerConfig

_SETTINGS = (EngineConfig, ServerConfig)
_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    tuple: flags.DEFINE_multi_string,
}


def define_flags() -> flags.FlagValues:
    """A flag for every setting; defaults and texts are those of the settings classes."""
    values = flags.FlagValues()
    texts = field_help(SchedulerConfig) | field_help(ServerConfig)
    texts |= {n: t for n, t in field_help(EngineConfig).items() if n not in texts}
    for settings in _SETTINGS:
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


def main(argv: list[str]) -> int:
    """Runs the server with these arguments (without the program's name); returns the exit code."""
    values = define_flags()
    booleans = {name for name in values if values[name].boolean}
    lists = {name for name in values if isinstance(values[name], flags.MultiFlag)}
    try:
        rest = values([sys.argv[0], *normalize_argv(argv, booleans, lists)])[1:]
        if values["help"].value:
            print((__doc__ or "").strip(), values.get_help(), sep="\n\n")
            return 0
        if rest:
            raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
        return serve(_fill(EngineConfig, values), _fill(ServerConfig, values))
    except (flags.Error, ValueError) as error:
        print(f"run_server.py: {error}", file=sys.stderr)
        return 1


def _fill(settings, values):
    """A settings object from the flags of the same names."""
    fields = {field.name: values[field.name].value for field in dataclasses.fields(settings)}
    return settings(**{n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
