"""Chat templates: Jinja programs that come with a model and write a conversation as one prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The template cannot write this conversation; the message says why."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration is a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    # Templates arrive with downloaded weights, so they run sandboxed and cannot change what they
    # are given.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the model's special tokens as its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles the template.

        Args:
          source: Jinja text.
          special_tokens: variable name (bos_token, eos_token, ...) -> text.

        Raises:
          ChatTemplateError: the text is no valid template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Writes the conversation as a prompt.

        Args:
          messages: each with a role and a content.
          add_generation_prompt: end with the words that open the assistant's turn.
          **variables: further variables that this template knows (tools, enable_thinking, ...).

        Raises:
          ChatTemplateError: the template refuses the conversation or trips over it.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        names.update(variables)
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # a template is a program: it may trip in any way
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error
