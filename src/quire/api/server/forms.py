"""The form that a request asks for, in OpenAI's words and in vLLM's.

Whether it can be had the engine says when it has compiled it, before any token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.server.errors import bad_request
from quire.api.tools.forced import LENIENT, own_style
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.structured import StructuredOutput

# vLLM's `guided_…` fields, and the keys of its `structured_outputs`, by what they are here.
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
KEYS = {"json": "json_schema"}


def form_of(asked: Mapping[str, Any]) -> StructuredOutput | None:
    """From the fields of a request; those that are None were not asked for."""
    forms: dict[str, StructuredOutput | None] = {}
    for name, value in asked.items():
        if value is not None:
            forms[name] = _form(name, value)
    found = {name: form for name, form in forms.items() if form is not None}
    if len(found) > 1:
        raise bad_request(f"Ask for one form of output, not for {' and '.join(found)}.")
    return next(iter(found.values()), None)


def _form(name: str, value: Any) -> StructuredOutput | None:
    try:
        if name == "response_format":
            return _response_format(value)
        if name in GUIDED:
            return StructuredOutput(**{GUIDED[name]: value})
        return _by_keys(value)
    except RequestError as error:
        raise bad_request(f"{name}: {error}"[:1000], param=name) from None


def _response_format(value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind != "json_schema":
        raise RequestError("the type must be text, json_object or json_schema.")
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("json_schema needs a schema, which is an object.")
    if not described.get("strict"):  # then what cannot be enforced is left to the model
        schema = {**schema, "x-guidance": {**LENIENT, **own_style(schema)}}
    return StructuredOutput(json_schema=schema)


def _by_keys(value: Any) -> StructuredOutput | None:
    if not isinstance(value, Mapping):
        raise RequestError("it must be an object such as {'regex': '[0-9]+'}.")
    asked = {KEYS.get(name, name): each for name, each in value.items() if each is not None}
    params = SamplingParams(structured=asked) if asked else SamplingParams()  # type: ignore[arg-type]
    return params.structured
