"""A grammar of calls: what the model writes is one, in its own format, with the right arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.tools import harmony, hermes, mistral
from quire.api.tools.definitions import Tool
from quire.api.tools.formats import ToolFormat
from quire.engine.grammar.source import ANY_OBJECT, JSON_STYLE, note, quoted
from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer
from quire.structured import MAX_GRAMMAR_CHARS, StructuredOutput

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
    tags = _Tags(tokenizer)
    lines = [note("The tools' grammar")]
    lines += [_start(tool_format, tags, several and tool_format.has_several, answer is not None)]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {_call(tool, i, tool_format, tags)}")
        lines.append(note(f"The tool {tool.name!r}"))
        lines.append(f"arguments_{i}: {as_json_rule(tool.parameters, tool.strict)}")
    if answer is not None:
        lines += _answer(answer, tool_format, tags)
    if tool_format.has_channels:
        lines += _thought(tags)
    grammar = "\n".join(lines)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"tools are too large to be forced: their schemas have more than "
            f"{MAX_GRAMMAR_CHARS:,} characters; send fewer."
        )
    return StructuredOutput(grammar=grammar)


def final_answer(
    answer: StructuredOutput, tool_format: ToolFormat, tokenizer: Tokenizer
) -> StructuredOutput:
    """JSON from a model that writes in channels: it may think, and then its answer has the form."""
    tags = _Tags(tokenizer)
    lines = ["start: thought answer", *_thought(tags), *_answer(answer, tool_format, tags)]
    grammar = "\n".join(lines)
    return StructuredOutput(grammar=grammar) if len(grammar) <= MAX_GRAMMAR_CHARS else answer


def is_json(form: StructuredOutput) -> bool:
    return form.kind in ("json_object", "json_schema")


def as_json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """JSON by a schema as a part of a grammar; what cannot be enforced is an error if `strict`."""
    style = {**JSON_STYLE, **({} if strict else LENIENT), **own_style(schema)}
    return "%json " + json.dumps({**schema, "x-guidance": style})


def own_style(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    own = schema.get("x-guidance")
    return own if isinstance(own, Mapping) else {}


class _Tags:
    """A tag is a token of its own where the model has it as a special one, and text elsewhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tag: str) -> str:
        token_id = self._special(tag)
        return quoted(tag) if token_id is None else f"<[{token_id}]>"

    def are_tokens(self, *tags: str) -> bool:
        return all(self._special(tag) is not None for tag in tags)

    def _special(self, tag: str) -> int | None:
        token_id = self._tokenizer.backend.token_to_id(tag)
        return token_id if token_id in self._tokenizer.special_ids else None


def _start(tool_format: ToolFormat, tags: _Tags, several: bool, has_answer: bool) -> str:
    if tool_format.name == "hermes":
        one = f'{tags(hermes.OPEN)} "\\n" call "\\n" {tags(hermes.CLOSE)}'
        calls = f'{one} ("\\n" {one})*' if several else one
    elif tool_format.name == "mistral":
        one = 'call (", " call)*' if several else "call"
        calls = f'{tags(mistral.TAG)} "[" {one} "]"'
    else:
        calls = "call+" if several else "call"
    either = f"({calls} | answer)" if has_answer else calls
    return f"start: thought {either}" if tool_format.has_channels else f"start: {either}"


def _call(tool: Tool, index: int, tool_format: ToolFormat, tags: _Tags) -> str:
    if tool_format.name == "mistral-named":
        name = quoted(tool.name)
        return f"{tags(mistral.TAG)} {name} {tags(mistral.ARGUMENTS)} arguments_{index}"
    if tool_format.name == "harmony":
        header = quoted(f"commentary to={harmony.FUNCTIONS}{tool.name} ")
        kind = f'{tags(harmony.CONSTRAIN)} "json" {tags(harmony.MESSAGE)}'
        return f"{tags(harmony.CHANNEL)} {header} {kind} arguments_{index}"
    head = f'{{"name": {json.dumps(tool.name)}, "{tool_format.arguments}": '
    return f'{quoted(head)} arguments_{index} "}}"'


def _answer(answer: StructuredOutput, tool_format: ToolFormat, tags: _Tags) -> list[str]:
    """The rule of an answer in JSON, and what errors call it."""
    schema = json.loads(str(answer.json_schema or ANY_OBJECT))
    head = ""
    if tool_format.has_channels:
        head = f'{tags(harmony.CHANNEL)} "final" {tags(harmony.MESSAGE)} '
    return [note("The response_format"), f"answer: {head}{as_json_rule(schema, strict=True)}"]


def _thought(tags: _Tags) -> list[str]:
    """What a model may think first, up to the token that ends a message. Where tags are no tokens,
    nothing: what is thought could not be told from what comes behind it."""
    if not tags.are_tokens(harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.START):
        return ['thought: ""']
    begin = f'{tags(harmony.CHANNEL)} "{harmony.ANALYSIS}" {tags(harmony.MESSAGE)}'
    end = f'{tags(harmony.END)} {tags(harmony.START)} "assistant"'
    return [f"thought: ({begin} THOUGHTS {end})?", r"THOUGHTS: /(.|\n)*/"]
