"""What may be asked of an output's form, and what is refused."""

from __future__ import annotations

import json

import pytest

from quire import RequestError, SamplingParams, StructuredOutput
from quire.structured import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_REGEX_CHARS, MAX_SCHEMA_CHARS

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def test_a_schema_is_kept_as_text_in_its_own_order() -> None:
    kept = StructuredOutput(json_schema=SCHEMA).json_schema
    assert kept == '{"type":"object","properties":{"b":{},"a":{}}}'
    assert StructuredOutput(json_schema=json.dumps(SCHEMA, indent=4)).json_schema == kept


@pytest.mark.parametrize(
    "form",
    [
        {"json_object": True},
        {"json_schema": SCHEMA},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a"'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_params_take_a_dict_and_give_back_plain_data(form) -> None:
    params = SamplingParams(structured=form)
    assert params.structured == StructuredOutput(**form)
    assert params.structured.kind == next(iter(form))
    again = json.loads(json.dumps(params.structured.as_dict()))
    assert SamplingParams(structured=again).structured == params.structured
    assert hash(params.structured) == hash(SamplingParams(structured=again).structured)


def test_choices_are_named_once() -> None:
    assert StructuredOutput(choice=["b", "a", "b"]).choice == ("b", "a")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "exactly one of json_object, json_schema, regex, choice, grammar, not none"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
        ({"regx": "a"}, "did you mean regex"),
        ({"regex": ""}, "regex must be a regular expression of 1 to 16,384"),
        ({"regex": 3}, "regex must be"),
        ({"regex": "\ud800"}, "regex must be"),
        ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "regex must be"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "grammar must be"),
        ({"choice": []}, "choice must be a list of 1 to 1,024"),
        ({"choice": "ab"}, "choice must be"),
        ({"choice": [""]}, "choice must be"),
        ({"choice": ["a", 1]}, "choice must be"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "choice must be"),
        ({"json_schema": "{"}, "json_schema must be a JSON schema"),
        ({"json_schema": [1]}, "json_schema must be"),
        ({"json_schema": True}, "json_schema must be"),
        ({"json_schema": {"a": float("nan")}}, "json_schema must be"),
        ({"json_schema": {"a": {1}}}, "json_schema must be"),
        ({"json_schema": {"a": "x" * MAX_SCHEMA_CHARS}}, "json_schema must be"),
        ({"json_schema": '{"a":' * 100_000}, "json_schema must be"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({1: 2}, "structured must be"),
        ("regex", "structured must be"),
        ([("regex", "a")], "structured must be"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_in_one_sentence(form, says) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured=form)
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 400
