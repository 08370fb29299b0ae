"""Structured output in the request fields of OpenAI, vLLM, SGLang, llama.cpp and TGI.

Whether a form can be used is known when the engine has compiled its grammar, before any token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.api.server.errors import bad_request
from quire.api.tools.forced import LENIENT, own_style
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.structured import StructuredOutput

# The keys of vLLM's `structured_outputs`, where they have another name here.
KEYS = {"json": "json_schema"}
# … and those that ask for nothing with these values: JSON has no other white space here anyway.
NEUTRAL_KEYS = {
    "disable_any_whitespace": (True, False),
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
}


def read_structured(asked: Mapping[str, Any]) -> StructuredOutput | None:
    """From the fields of a request; those that are None were not asked for."""
    given = {name: read_field(name, value) for name, value in asked.items() if value is not None}
    found = {name: structured for name, structured in given.items() if structured is not None}
    if len(found) > 1:
        raise bad_request(f"Ask for one form of output, not for {' and '.join(found)}.")
    return next(iter(found.values()), None)


def read_field(name: str, value: Any, shown: str | None = None) -> StructuredOutput | None:
    """Of one field; `shown` is its name in the request, if that is another."""
    try:
        return STRUCTURED_FIELDS[name](value)
    except RequestError as error:
        shown = shown or name
        raise bad_request(f"{shown}: {error}"[:1000], param=shown) from None


def _is(kind: str) -> Callable[[Any], StructuredOutput]:
    """A field whose value is what `StructuredOutput` takes as `kind`."""
    return lambda value: StructuredOutput(**{kind: value})


def _unless_empty(kind: str) -> Callable[[Any], StructuredOutput | None]:
    """The same for servers whose default is an empty text."""
    return lambda value: None if value == "" else StructuredOutput(**{kind: value})


def _response_format(value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's way, and of several hosts
        return StructuredOutput(json_object=True) if schema is None else _by_schema(value)
    if kind == "json_schema":
        described = value.get("json_schema")
        return _by_schema(value if described is None else described)
    if kind == "regex":
        return StructuredOutput(regex=value.get("regex", value.get("pattern", "")))
    if kind == "grammar":
        return StructuredOutput(grammar=value.get("grammar", ""))
    raise RequestError("the type must be text, json_object, json_schema, regex or grammar.")


def _by_schema(described: Any) -> StructuredOutput:
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("json_schema needs a schema, which is an object.")
    if not described.get("strict"):  # then what cannot be enforced is left to the model
        schema = {**schema, "x-guidance": {**LENIENT, **own_style(schema)}}
    return StructuredOutput(json_schema=schema)


def _by_keys(value: Any) -> StructuredOutput | None:
    if not isinstance(value, Mapping):
        raise RequestError("it must be an object such as {'regex': '[0-9]+'}.")
    asked = {
        KEYS.get(name, name): each
        for name, each in value.items()
        if each is not None and each not in NEUTRAL_KEYS.get(name, ())
    }
    params = SamplingParams(structured=asked) if asked else SamplingParams()  # type: ignore[arg-type]
    return params.structured


def _grammar(value: Any) -> StructuredOutput | None:
    """llama.cpp's is a text in GBNF; TGI's an object with a type and a value."""
    if not isinstance(value, Mapping):
        return _unless_empty("grammar")(value)
    kinds = {"json": "json_schema", "json_schema": "json_schema", "regex": "regex"}
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds or "value" not in value:
        raise RequestError(
            "it must be a text, or an object such as {'type': 'regex', 'value': '[0-9]+'}."
        )
    return StructuredOutput(**{kinds[kind]: value["value"]})


STRUCTURED_FIELDS: Mapping[str, Callable[[Any], StructuredOutput | None]] = {
    "response_format": _response_format,
    # vLLM's
    "guided_json": _is("json_schema"),
    "guided_json_object": lambda value: StructuredOutput(json_object=True) if value else None,
    "guided_regex": _is("regex"),
    "guided_choice": _is("choice"),
    "guided_grammar": _is("grammar"),
    "structured_outputs": _by_keys,
    # SGLang's and llama.cpp's
    "json_schema": _unless_empty("json_schema"),
    "regex": _unless_empty("regex"),
    "ebnf": _unless_empty("grammar"),
    "grammar": _grammar,
    "structured": _by_keys,
}
