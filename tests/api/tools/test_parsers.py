"""Calls as each family writes them, whole and in pieces of any size."""

from __future__ import annotations

import json

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.tools.events import Call, CallArguments, CallBegins, ParsedMessage, Text
from quire.api.tools.hermes import HermesParser
from quire.api.tools.llama import LlamaParser
from quire.api.tools.mistral import MistralParser
from quire.api.tools.parser import parse

PARSERS = {"hermes": HermesParser, "llama": LlamaParser, "mistral": MistralParser}
ROME = '{"city": "Rome", "unit": "C"}'
TRICKY = '{"text": "</tool_call> \\"}]{[ <tool_call>\\\\", "n": [1, {"a": "}"}]}'

CASES = [
    # format, text, words, calls
    ("hermes", "Hello there. ", "Hello there. ", []),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
        "",
        [("weather", ROME)],
    ),
    (
        "hermes",
        f'I look.\n\n<tool_call>{{"name":"a","arguments":{ROME}}}</tool_call>\n'
        f'<tool_call>{{"name": "b", "arguments": {{}}}}</tool_call> \nDone. ',
        "I look.Done.",
        [("a", ROME), ("b", "{}")],
    ),
    ("hermes", f'<tool_call>{{"arguments": {ROME}, "name": "a"}}</tool_call>', "", [("a", ROME)]),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    (
        "hermes",
        f'<tool_call>{{"name": "a", "arguments": {json.dumps(ROME)}}}</tool_call>',
        "",
        [("a", ROME)],
    ),
    ("hermes", f'<tool_call>{{"name": "a", "arguments": {TRICKY}}}', "", [("a", TRICKY)]),
    (
        "hermes",
        f'<tool_call>{{"name": "a", "arguments": {ROME}, "id": "x"}}</tool_call>',
        "",
        [("a", ROME)],
    ),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": 1', "", [("a", '{"b": 1')]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"b": </tool_call> oh',
        "oh",
        [("a", '{"b": ')],
    ),
    ("hermes", "use the <tool_call> tag, like so", "use the <tool_call> tag, like so", []),
    ("hermes", "a </tool_call> too many", "a </tool_call> too many", []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    ("hermes", '<tool_call>{"name": "né\\n", "arguments": {}}</tool_call>', "", [("né\n", "{}")]),
    ("llama", "Hello.", "Hello.", []),
    ("llama", f'{{"name": "weather", "parameters": {ROME}}}', "", [("weather", ROME)]),
    (
        "llama",
        f'<|python_tag|>{{"name": "a", "parameters": {ROME}}}; {{"name": "b", "parameters": {{}}}}',
        "",
        [("a", ROME), ("b", "{}")],
    ),
    (
        "llama",
        f'{{"type": "function", "name": "a", "parameters": {ROME}}}',
        "",
        [("a", ROME)],
    ),
    (
        "llama",
        f'{{"type": "function", "function": {{"name": "a", "parameters": {ROME}}}}};',
        "",
        [("a", ROME)],
    ),
    ("llama", ' {"answer": 42} ', ' {"answer": 42} ', []),
    ("llama", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama", '{"nam', '{"nam', []),
    ("llama", "<|python_tag|>print(1)", "print(1)", []),
    (
        "llama",
        f'Well: {{"name": "a", "parameters": {ROME}}}',
        f'Well: {{"name": "a", "parameters": {ROME}}}',
        [],
    ),
    (
        "llama",
        f'Well.<|python_tag|>{{"name": "a", "parameters": {ROME}}} yes',
        "Well.yes",
        [("a", ROME)],
    ),
    ("mistral", "Hello [TOOL", "Hello [TOOL", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "a", "arguments": {ROME}}}]', "", [("a", ROME)]),
    (
        "mistral",
        f'Hm. [TOOL_CALLS] [{{"name": "a", "arguments": {ROME}, "id": "abcdefghi"}}, '
        f'{{"name": "b", "arguments": {TRICKY}}}] ',
        "Hm.",
        [("a", ROME), ("b", TRICKY)],
    ),
    ("mistral", f'[TOOL_CALLS]{{"name": "a", "arguments": {ROME}}}', "", [("a", ROME)]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ROME}", "", [("weather", ROME)]),
    (
        "mistral",
        f"[TOOL_CALLS]a{ROME}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{TRICKY}",
        "",
        [("a", ROME), ("b", TRICKY)],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1', "", [("a", '{"x": 1')]),
    ("mistral", "[TOOL_CALLS] is what {they} say", "[TOOL_CALLS] is what {they} say", []),
]


def read(name, pieces):
    parser = PARSERS[name]()
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.flush()]


@pytest.mark.parametrize(("name", "text", "words", "calls"), CASES)
def test_a_whole_message(name, text, words, calls):
    message = parse(PARSERS[name](), text)
    assert message == ParsedMessage(words, [Call(*each) for each in calls])


@pytest.mark.parametrize(("name", "text", "words", "calls"), CASES)
def test_letter_by_letter(name, text, words, calls):
    assert ParsedMessage.of(read(name, text)) == parse(PARSERS[name](), text)


PIECES = st.sampled_from(
    [
        *'ab {}[]"\\,:;<>\n',
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": {"a": "b"}}',
        '{"arguments": {}, "name": "g"}',
        '"name"',
        "<tool",
    ]
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(list(PARSERS)),
    st.one_of(
        st.sampled_from([case[1] for case in CASES]),
        st.lists(PIECES, max_size=14).map("".join),
    ),
    st.data(),
)
def test_pieces_of_any_size_give_the_same(name, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert ParsedMessage.of(read(name, pieces)) == parse(PARSERS[name](), text)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(list(PARSERS)),
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.lists(
        st.tuples(
            st.from_regex("[a-z_]{1,8}", fullmatch=True),
            st.dictionaries(st.text(max_size=8), st.text(max_size=12) | st.integers(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_what_is_written_is_read(name, words, calls):
    """Any words, any arguments."""
    words = words.strip().replace("[", "").replace("<", "").lstrip("{").strip()
    written = {
        "hermes": lambda: (
            words
            + "".join(
                f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>"
                for n, a in calls
            )
        ),
        "llama": lambda: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
        "mistral": lambda: (
            words + "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])
        ),
    }[name]()
    message = parse(PARSERS[name](), written)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert message.text == ("" if name == "llama" else words)


def as_written(name, words, calls):
    """Calls as a model of this family writes them, behind words."""
    if name == "hermes":
        tagged = (json.dumps({"name": n, "arguments": a}) for n, a in calls)
        return words + "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in tagged)
    if name == "llama":
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if name == "mistral-named":
        return words + "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    return words + "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from([*PARSERS, "mistral-named"]),
    st.text(st.characters(codec="utf-8", exclude_characters="<[{"), max_size=20),
    st.lists(
        st.tuples(
            st.from_regex("[a-z_]{1,8}", fullmatch=True),
            st.dictionaries(st.text(max_size=8), st.text(max_size=12) | st.integers(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_no_half_call_is_words_wherever_the_text_is_cut(name, words, calls, data):
    words = words.strip()
    text = as_written(name, words, calls)
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = PARSERS.get(name, MistralParser)()
    events = [event for piece in pieces for event in parser.push(piece)]
    message = ParsedMessage.of([*events, *parser.flush(is_cut=True)])
    said = "" if name == "llama" else words
    assert message.text.strip() == text[: len(said)].strip()
    for got, (right, arguments) in zip(message.calls, calls, strict=False):
        assert got.name == right and json.dumps(arguments).startswith(got.arguments)
    whole = PARSERS.get(name, MistralParser)()
    assert message == ParsedMessage.of([*whole.push(text), *whole.flush(is_cut=True)])


CUT = [
    ("hermes", "Well. <tool_call>", "Well."),
    ("hermes", 'Well.\n<tool_call>\n{"name": "we', "Well."),
    ("hermes", '<tool_call>{"name": "a", "arguments":', ""),
    ("hermes", '<tool_call>{"arguments": {"a": 1}', ""),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}\n</tool_', ""),
    ("hermes", "Is 1 < 2? ", "Is 1 < 2? "),
    ("hermes", "Well. <tool", "Well."),
    ("llama", '{"name": "a", "param', ""),
    ("llama", '{"type": "function", "function": {"name": "a"', ""),
    ("llama", '{"name": "a", "parameters": {}}; {"na', ""),
    ("llama", '<|python_tag|>{"name', ""),
    ("llama", '{"name": "Bob", "age": 3, "likes": "l', '{"name": "Bob", "age": 3, "likes": "l'),
    ("llama", '{"answer": {"name', '{"answer": {"name'),
    ("mistral", "Hm. [TOOL_CALLS]", "Hm."),
    ("mistral", "Hm. [TOOL_CALLS]weather[AR", "Hm."),
    ("mistral", '[TOOL_CALLS][{"name": "a"', ""),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, ', ""),
    ("mistral", "a list [1, 2", "a list [1, 2"),
]


@pytest.mark.parametrize(("name", "text", "words"), CUT)
def test_a_text_that_is_cut(name, text, words):
    for pieces in ([text], text):
        parser = PARSERS[name]()
        events = [event for piece in pieces for event in parser.push(piece)]
        assert ParsedMessage.of([*events, *parser.flush(is_cut=True)]).text == words


def test_arguments_come_as_they_are_written():
    """Not only when a call is whole: they may be long."""
    parser = HermesParser()
    assert parser.push('Hm <tool_call>{"name": "write", "argu') == [Text("Hm")]
    assert parser.push('ments": {"text": "On') == [
        CallBegins(0, "write"),
        CallArguments(0, '{"text": "On'),
    ]
    assert parser.push("ce up") == [CallArguments(0, "ce up")]
    assert parser.push('on"}}</tool') == [CallArguments(0, 'on"}')]
    assert parser.push("_call>") == []
    assert parser.flush() == []


def test_no_part_of_a_tag_is_shown():
    parser = HermesParser()
    shown = [event for char in "a b <tool_cal <tool_call" for event in parser.push(char)]
    assert ParsedMessage.of(shown).text == "a b <tool_cal"
    assert parser.flush() == [Text(" <tool_call")]


@pytest.mark.parametrize("name", PARSERS)
def test_only_one_call_if_that_is_wished(name):
    texts = {
        "hermes": '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 2,
        "llama": '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
    }
    message = parse(PARSERS[name](only_one=True), texts[name])
    assert message == ParsedMessage("", [Call("a", "{}")])


def test_a_long_answer_costs_no_more_than_its_length():
    """An object that begins like a call is held; to look at it anew each time would take hours."""
    parser = LlamaParser()
    parser.push('{"name": "Bob", "life": "')
    for _ in range(20_000):
        assert parser.push("and so on ") == []
    assert ParsedMessage.of(parser.flush()).text.startswith('{"name"')
