"""Calls that are forced: whatever the model would like, they are calls with the right arguments."""

from __future__ import annotations

import json
import re

import pytest
from grammar_walk import ids_of, text_of
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from quire.api.tools.definitions import read_tools
from quire.api.tools.forced import forced_calls
from quire.api.tools.formats import FORMATS, choose_format
from quire.api.tools.parser import parse
from quire.engine.grammar.compiler import GrammarCompiler
from quire.errors import RequestError
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer
from quire.structured import StructuredOutput

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather. start: "x" ::= odd\nwords',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12, "description": "a city's name"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = read_tools([WEATHER, CLOCK])


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request) -> Tokenizer:
    """Tags as text, and as special tokens."""
    found = open_model("smollm2", progress=False).tokenizer()
    if request.param == "special":
        tags = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
        tags += ["<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"]
        found.backend.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
        found = Tokenizer(found.backend, found.special_tokens, found.chat_template)
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
    yield made
    made.close()


def check(call) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    assert call.name in schemas
    Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_forced_is_read_as_a_call(compiler, tokenizer, name, several):
    tool_format = FORMATS[name]
    form = forced_calls(TOOLS, tool_format, tokenizer, several=several)
    counts, names = set(), set()
    for seed in range(8):
        ids = ids_of(compiler, form, seed, most=400)
        if ids is None:
            continue
        text = tokenizer.decode(ids, skip_special_tokens=False)
        message = parse(tool_format.parser(), text)
        assert message.text == "" and message.calls, text
        for call in message.calls:
            check(call)
        counts.add(len(message.calls))
        names |= {call.name for call in message.calls}
    assert names == {"get_weather", "clock"}
    assert counts == {1} or (several and tool_format.has_several)


@pytest.mark.parametrize("name", FORMATS)
def test_a_special_tag_is_its_token(compiler, tokenizer, name):
    form = forced_calls(TOOLS[1:], FORMATS[name], tokenizer, several=False)
    ids = next(filter(None, (ids_of(compiler, form, seed) for seed in range(24))))
    has_tag = FORMATS[name].shows_special(tokenizer) and name != "llama3"
    assert (ids[0] in tokenizer.special_ids) == has_tag


def test_a_call_or_an_answer(compiler, tokenizer):
    answer = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
    answer["additionalProperties"] = False
    form = StructuredOutput(json_schema=answer)
    form = forced_calls(TOOLS[1:], FORMATS["hermes"], tokenizer, several=False, answer=form)
    texts = {text_of(compiler, form, seed) for seed in range(12)}
    read = [parse(FORMATS["hermes"].parser(), text) for text in texts if text is not None]
    assert {bool(message.calls) for message in read} == {True, False}
    assert all(message.calls or json.loads(message.text) == {"ok": True} for message in read)


def test_what_cannot_be_enforced_is_refused_only_where_it_must_be(compiler, tokenizer):
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        function = {"name": "f", "parameters": unique, "strict": strict}
        tools = read_tools([{"type": "function", "function": function}])
        form = forced_calls(tools, FORMATS["hermes"], tokenizer, several=False)
        error = compiler.compile(form).error
        assert ("uniqueItems" in error) if strict else error is None


BAD_PARAMETERS = [
    ({"$ref": "#/$defs/nowhere"}, "Pointer '/$defs/nowhere' does not exist"),
    ({"type": "string", "pattern": "[a-"}, "unclosed character class"),
    ({"type": "word"}, "Invalid type: word"),
]


@pytest.mark.parametrize(("schema", "says"), BAD_PARAMETERS)
def test_a_schema_that_cannot_be_used_names_its_tool(compiler, tokenizer, schema, says):
    parameters = {"type": "object", "properties": {"a": schema}}
    bad = {"type": "function", "function": {"name": "my.tool-2", "parameters": parameters}}
    tools = read_tools([WEATHER, bad, CLOCK])
    form = forced_calls(tools, FORMATS["hermes"], tokenizer, several=True)
    error = f"The tool 'my.tool-2' cannot be used ({says}); change it."
    assert compiler.compile(form).error == error


def test_an_answer_that_cannot_be_had_is_named_too(compiler, tokenizer):
    answer = StructuredOutput(json_schema={"type": "word"})
    form = forced_calls(TOOLS, FORMATS["hermes"], tokenizer, several=True, answer=answer)
    error = compiler.compile(form).error
    assert error == "The response_format cannot be used (Invalid type: word); change it."


def test_tools_that_are_too_much_together_are_said_to_be(compiler, tokenizer):
    number = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99999989}}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": number}}])
    form = forced_calls(tools, FORMATS["hermes"], tokenizer, several=False)
    error = compiler.compile(form).error
    assert re.fullmatch(r"The tools' grammar cannot be used \(.* to compile\); change it\.", error)


def test_too_many_schemas_are_refused(tokenizer):
    big = {"type": "object", "properties": {"x" * 40_000: {}}}
    tools = read_tools(
        [{"type": "function", "function": {"name": f"f{i}", "parameters": big}} for i in range(2)]
    )
    with pytest.raises(RequestError, match="tools are too large"):
        forced_calls(tools, FORMATS["hermes"], tokenizer, several=False)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("…<tool_call>…", "hermes"),
        ("… <|python_tag|> …", "llama3"),
        ("<|python_tag|> <tool_call>", "hermes"),
        ("… [TOOL_CALLS] …", "mistral"),
        ("… [TOOL_CALLS] name [ARGS] …", "mistral-named"),
    ],
)
def test_the_template_says_which_format_a_model_knows(template, name):
    assert choose_format(template).name == name
    assert choose_format(template, "llama3").name == "llama3"


def test_names_of_calls():
    ids = {each.new_id() for each in FORMATS.values() for _ in range(20)}
    assert len(ids) == 20 * len(FORMATS)
    assert all(len(FORMATS["mistral"].new_id()) == 9 for _ in range(5))
