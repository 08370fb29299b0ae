"""Chat templates: a conversation becomes the prompt text that the model was trained on.

A template is a program that comes with the model, so it runs in jinja2's sandbox, in the same
environment that `transformers` gives it: the same filters, functions, extensions and white space.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import RequestError

# Names of the template's own, which no variable may take.
RESERVED = ("messages", "add_generation_prompt", "self")


def refuse_reserved(variables: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise for variables that a user may not set; `others` is what the request has fields for."""
    for name in (*RESERVED, *others):
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}, which has its own place in the "
                "conversation; leave it out."
            )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation; `variables` are handed to the template by name."""
    values = {"tools": None, "documents": None, **(variables or {})}
    values["messages"] = _checked(messages)
    values["add_generation_prompt"] = add_generation_prompt
    try:
        return _compiled(template).render(values)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"The model's chat template is broken ({_sentence(error)}); give a prompt instead."
        ) from error
    except Exception as error:  # a template is a program: it can fail in any way a program can
        raise RequestError(
            f"The model's chat template refuses this conversation ({_sentence(error)});"
            " change the messages or give a prompt instead."
        ) from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("A conversation must be a list of messages with role and content.")
    if not messages:
        raise RequestError("A conversation must have at least one message.")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"Message {index} must be a mapping with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"Message {index} needs a role, such as 'system', 'user' or 'assistant'."
        )
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"Message {index} needs content: a string or a list of text parts.")
    return {**message, "content": _text(index, content)}


def _text(index: int, content: Any) -> str | None:
    """Templates of text models expect one string: text parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"The content of message {index} must be a string or a list of parts.")
    return "\n".join(_part(index, part) for part in content)


def _part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"A content part of message {index} is not of the form"
            " {'type': 'text', 'text': ...}, the only form this model takes."
        )
    return text


@lru_cache(maxsize=64)
def takes_tools(template: str) -> bool:
    """Whether a template has a place for tools; one that is broken has none."""
    try:
        return "tools" in meta.find_undeclared_variables(_environment().parse(template))
    except TemplateError:
        return False


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
