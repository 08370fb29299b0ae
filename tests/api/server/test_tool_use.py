"""Tools before and behind a chat, for models whose tags are special tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.server.answers.call_writer import CallWriter
from quire.api.server.answers.choices import Delta
from quire.api.server.answers.prompts import Prompt
from quire.api.server.answers.tool_use import ToolUse
from quire.api.tools.formats import FORMATS
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams

CLOCK = {"type": "function", "function": {"name": "clock"}}
PROMPT = Prompt(np.arange(4, dtype=np.int32))
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[0].content }}",
    "llama3": "{{ tools }}<|python_tag|>{{ messages[0].content }}",
    "mistral": "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}",
    "mistral-named": "{{ tools }}[TOOL_CALLS][ARGS]{{ messages[0].content }}",
}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "clock", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"a": 1}}]',
    "mistral-named": '[TOOL_CALLS]clock[ARGS]{"a": 1}',
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = open_model("smollm2", progress=False).tokenizer().backend
    tags = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
    found.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    return found


def use(backend, template, choice=None, several=None, tools=(CLOCK,)):
    tokenizer = Tokenizer(backend, {}, template)
    return ToolUse.read(tokenizer, AnswerFormat.choose(template), list(tools), choice, several)


def writer(name):
    return CallWriter(FORMATS[name].parser(), FORMATS[name])


def delta(text, reason=None, stop=None):
    return Delta(0, 0, False, text, [], finish_reason=reason, stop_reason=stop)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_gets_the_tools_and_the_text_keeps_its_tags(backend, name):
    found = use(backend, TEMPLATES[name])
    assert found.tool_format.name == name and found.is_on
    messages, variables = found.conversation([{"role": "user", "content": "Hi"}], {"x": 1})
    assert messages == [{"role": "user", "content": "Hi"}]
    assert variables == {"x": 1, "tools": [CLOCK]}
    params = found.params(SamplingParams(), PROMPT)
    assert params.skip_special_tokens == (name == "hermes") and params.structured is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_that_may_not_be_called_are_not_shown(backend, name):
    found = use(backend, TEMPLATES[name], choice="none")
    assert not found.is_on
    assert found.conversation([], {}) == ([], {})
    params = SamplingParams(structured={"regex": "a"})
    assert found.params(params, PROMPT) is params


def test_a_forced_call_comes_before_a_form_and_a_chosen_one_beside_it(backend):
    asked = SamplingParams(structured={"json_object": True})
    forced = use(backend, TEMPLATES["hermes"], "required").params(asked, PROMPT).structured
    chosen = use(backend, TEMPLATES["hermes"], "auto").params(asked, PROMPT).structured
    assert "answer" not in forced.grammar and "| answer" in chosen.grammar
    pattern = SamplingParams(structured={"regex": "a"})
    free = use(backend, TEMPLATES["hermes"], "auto").params(pattern, PROMPT)
    assert free.structured.regex == "a"


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_as_openai_writes_them(name):
    whole = writer(name)
    text = f"Well. {WRITTEN[name]}" if name != "llama3" else WRITTEN[name]
    message = whole.message(delta(text, "stop"))
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": '{"a": 1}'}
    assert message["content"] == (None if name == "llama3" else "Well.")
    assert whole.finish_reason("stop") == "tool_calls"
    assert whole.finish_reason("length") == "length"
    parts = writer(name)
    deltas = [each for char in WRITTEN[name] for each in parts.deltas(delta(char))]
    deltas += parts.deltas(delta("", "stop"))
    pieces = [each["tool_calls"][0] for each in deltas]
    assert {piece["index"] for piece in pieces} == {0}
    assert pieces[0]["id"] and pieces[0]["function"] == {"name": "clock", "arguments": ""}
    assert not any("id" in piece for piece in pieces[1:])
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(joined) == {"a": 1}


def test_an_answer_without_calls_is_an_answer():
    made = CallWriter(FORMATS["hermes"].parser(), FORMATS["hermes"], shows_thoughts=False)
    assert made.message(delta("Hello.", "stop")) == {"content": "Hello."}
    assert made.finish_reason("stop") == "stop"


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_is_cut_is_not_content(name, reason):
    """By `max_tokens` or by a stop string, whole and as a stream."""
    text = WRITTEN[name] if name == "llama3" else f"Well. {WRITTEN[name]}"
    for end in range(len(text)):
        stop = "x" if reason == "stop" else None
        message = writer(name).message(delta(text[:end], reason, stop))
        content = message["content"] or ""
        assert content.strip() == ("" if name == "llama3" else "Well. "[:end].strip()), text[:end]
        made = writer(name)
        deltas = [each for char in text[:end] for each in made.deltas(delta(char))]
        deltas += made.deltas(delta("", reason, stop))
        assert "".join(each.get("content", "") for each in deltas) == content
        pieces = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
        joined = "".join(piece["function"]["arguments"] for piece in pieces)
        calls = message.get("tool_calls", [])
        assert joined == "".join(call["function"]["arguments"] for call in calls)
