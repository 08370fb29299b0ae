"""A grammar of calls: what the model writes is one, in its own format, with the right arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.tools import harmony, hermes, mistral
from quire.api.tools.definitions import Tool
from quire.api.tools.formats import ToolFormat
from quire.api.tools.tag_terminals import TagTerminals
from quire.engine.grammar.source import ANY_OBJECT, JSON_STYLE, note, quoted
from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer
from quire.structured import MAX_GRAMMAR_CHARS, StructuredOutput
from quire.thinking import CHANNEL, FUNCTIONS

LENIENT = {"lenient": True, "coerce_one_of": True}


def forced_calls(
    tools: Sequence[Tool],
    tool_format: ToolFormat,
    tokenizer: Tokenizer,
    *,
    several: bool,
    answer: StructuredOutput | None = None,
) -> StructuredOutput:
    """One call of one of the tools, or several; with `answer`, a form of JSON, or else that."""
    tags = TagTerminals(tokenizer)
    lines = [note("The tools' grammar")]
    lines += [_start(tool_format, tags, several and tool_format.has_several, answer is not None)]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {_call(tool, i, tool_format, tags)}")
        lines.append(note(f"The tool {tool.name!r}"))
        lines.append(f"arguments_{i}: {as_json_rule(tool.parameters, tool.strict)}")
    if answer is not None:
        lines += _answer(answer, tool_format, tags)
    grammar = "\n".join(lines)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"tools are too large to be forced: their schemas have more than "
            f"{MAX_GRAMMAR_CHARS:,} characters; send fewer."
        )
    return StructuredOutput(grammar=grammar)


def is_json(form: StructuredOutput) -> bool:
    return form.kind in ("json_object", "json_schema")


def as_json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """JSON by a schema as a part of a grammar; what cannot be enforced is an error if `strict`."""
    style = {**JSON_STYLE, **({} if strict else LENIENT), **own_style(schema)}
    return "%json " + json.dumps({**schema, "x-guidance": style})


def own_style(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    own = schema.get("x-guidance")
    return own if isinstance(own, Mapping) else {}


def _start(tool_format: ToolFormat, tags: TagTerminals, several: bool, has_answer: bool) -> str:
    if tool_format.name == "hermes":
        one = f'{tags(hermes.OPEN)} "\\n" call "\\n" {tags(hermes.CLOSE)}'
        calls = f'{one} ("\\n" {one})*' if several else one
    elif tool_format.name == "mistral":
        one = 'call (", " call)*' if several else "call"
        calls = f'{tags(mistral.TAG)} "[" {one} "]"'
    else:
        calls = "call+" if several else "call"
    return f"start: {calls} | answer" if has_answer else f"start: {calls}"


def _call(tool: Tool, index: int, tool_format: ToolFormat, tags: TagTerminals) -> str:
    if tool_format.name == "mistral-named":
        name = quoted(tool.name)
        return f"{tags(mistral.TAG)} {name} {tags(mistral.ARGUMENTS)} arguments_{index}"
    if tool_format.name == "harmony":
        header = quoted(f"commentary to={FUNCTIONS}{tool.name} ")
        kind = f'{tags(harmony.CONSTRAIN)} "json" {tags(harmony.MESSAGE)}'
        return f"{tags(CHANNEL)} {header} {kind} arguments_{index}"
    head = f'{{"name": {json.dumps(tool.name)}, "{tool_format.arguments}": '
    return f'{quoted(head)} arguments_{index} "}}"'


def _answer(answer: StructuredOutput, tool_format: ToolFormat, tags: TagTerminals) -> list[str]:
    """The rule of an answer in JSON, and what errors call it."""
    schema = json.loads(str(answer.json_schema or ANY_OBJECT))
    head = ""
    if tool_format.has_channels:
        head = f'{tags(CHANNEL)} "final" {tags(harmony.MESSAGE)} '
    return [note("The response_format"), f"answer: {head}{as_json_rule(schema, strict=True)}"]
