"""What a settings class says about its fields, so that flags need not say it again."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

_ENTRY = re.compile(
    r"^      ?(?P<names>[a-z_0-9]+(,\s*[a-z_0-9]+)*,?)(?P<colon>:\s+(?P<text>.*))?$"
)


def field_help(settings: type) -> dict[str, str]:
    """Field name -> description, from the "Attributes:" of a docstring."""
    found: dict[str, str] = {}
    for names, text in _entries(settings.__doc__ or ""):
        found |= dict.fromkeys(names, text[:1].upper() + text[1:])
    return found


def _entries(docstring: str) -> Iterator[tuple[list[str], str]]:
    _, _, attributes = docstring.partition("Attributes:")
    names: list[str] = []
    text: list[str] = []
    for line in attributes.splitlines():
        entry = _ENTRY.match(line)
        if entry is None:
            text.append(line.strip())
            continue
        if text and names:
            yield names, " ".join(text).strip()
            names, text = [], []
        names += [name.strip() for name in entry["names"].split(",") if name.strip()]
        if entry["colon"]:
            text = [entry["text"]]
    if names:
        yield names, " ".join(text).strip()


def field_kinds(settings: type) -> dict[str, type]:
    """Field name -> str, int, float, bool or tuple (several strings), None left aside."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(settings).items():
        options = [o for o in typing.get_args(hint) if o is not type(None)] or [hint]
        if typing.get_origin(hint) is tuple:
            kinds[name] = tuple
        elif any(typing.get_origin(o) is typing.Literal or isinstance(o, str) for o in options):
            kinds[name] = str  # one of a few words
        else:  # a number or a word is written as a word
            kinds[name] = str if str in options or len(options) > 1 else options[0]
    return kinds
