"""Forms that begin behind thoughts: what the grammar takes of a model's answer, and what not."""

from __future__ import annotations

import pytest
from grammar_walk import text_of
from tokenizers import AddedToken

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.preamble import preamble
from quire.api.tools.definitions import read_tools
from quire.api.tools.forced import forced_calls
from quire.api.tools.formats import FORMATS
from quire.api.tools.parser import parse
from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.state import GrammarState
from quire.errors import RequestError
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer
from quire.structured import StructuredOutput

OK = {
    "type": "object",
    "properties": {"ok": {"const": True}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMS = {
    '{"ok": true}': StructuredOutput(json_schema=OK),
    "12": StructuredOutput(regex="[0-9]{2}"),
    "yes": StructuredOutput(choice=["yes", "no"]),
    "ab": StructuredOutput(grammar='start: text\ntext: "ab"'),  # a name that preambles have
}
TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]"]
CHANNEL_TAGS = ["<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"]


@pytest.fixture(scope="module", params=["letters", "tokens", "special"])
def tokenizer(request) -> Tokenizer:
    """Tags as letters, as tokens with a text of their own (Qwen), and as special ones (Mistral)."""
    found = open_model("smollm2", progress=False).tokenizer()
    if request.param != "letters":
        is_special = request.param == "special"
        tags = [AddedToken(tag, special=is_special) for tag in [*TAGS, *CHANNEL_TAGS]]
        found.backend.add_special_tokens(tags) if is_special else found.backend.add_tokens(tags)
        found = Tokenizer(found.backend, found.special_tokens, found.chat_template)
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
    yield made
    made.close()


def takes(compiler, tokenizer, form, text) -> bool:
    grammar = compiler.compile(form)
    grammar.check()
    matcher = GrammarState(grammar).matcher
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.consume_token(i) for i in ids) and matcher.is_accepting()


def behind(form: StructuredOutput, first: str | None) -> StructuredOutput:
    return StructuredOutput(**(form.as_dict() | {"preamble": first}))


@pytest.mark.parametrize("answer", FORMS)
@pytest.mark.parametrize("name", ["think", "mistral"])
def test_a_form_begins_behind_the_thought(compiler, tokenizer, answer, name):
    found = AnswerFormat.choose(None, thoughts=name)
    assert found.thoughts is not None
    begin, end = found.thoughts.open, found.thoughts.close
    thought = f'Is {{"ok": false}} or {answer}?\nNo, é </thin'
    for opening, taken, refused in (
        ("free", [f"{begin}\n{thought}\n{end}\n\n{answer}", answer], [thought + answer]),
        ("open", [f"{thought}{end}{answer}", f"{end}\n{answer}"], [answer, thought]),
        ("closed", [answer], [f"{begin}{end}{answer}"]),
    ):
        first = preamble(found, tokenizer, opening, has_header=False)
        form = behind(FORMS[answer], first)
        for text in taken:
            assert takes(compiler, tokenizer, form, text), (opening, text)
            assert parse(found.parser(opening, may_call=False), text).text == answer
        for text in refused:
            assert not takes(compiler, tokenizer, form, text), (opening, text)


def test_a_forced_call_stands_behind_the_thought(compiler, tokenizer):
    found = AnswerFormat.choose(None, calls="hermes", thoughts="think")
    tools = read_tools([{"type": "function", "function": {"name": "clock"}}])
    calls = forced_calls(tools, FORMATS["hermes"], tokenizer, several=False)
    form = behind(calls, preamble(found, tokenizer, "open", has_header=True))
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert takes(compiler, tokenizer, form, f"Hm.</think>\n\n{call}")
    assert not takes(compiler, tokenizer, form, call)
    [read] = parse(found.parser("open"), f"Hm.</think>\n\n{call}").calls
    assert read.name == "clock"


def test_channels(compiler, tokenizer):
    """Thoughts where tags are tokens, which thoughts have none of; the header in any case."""
    found = AnswerFormat.choose(None, thoughts="harmony")
    is_special = found.shows_special(tokenizer)
    thought = "<|channel|>analysis<|message|>Is it? {\n<|end|><|start|>assistant"
    tools = read_tools([{"type": "function", "function": {"name": "clock"}}])
    asked = FORMS['{"ok": true}']
    either = forced_calls(tools, found.calls, tokenizer, several=False, answer=asked)
    call = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    final = '<|channel|>final<|message|>{"ok": true}'
    for form, texts in (
        (behind(asked, preamble(found, tokenizer, "free", has_header=False)), {final: 1, call: 0}),
        (behind(either, preamble(found, tokenizer, "free", has_header=True)), {final: 1, call: 1}),
    ):
        for text, fits in texts.items():
            assert takes(compiler, tokenizer, form, text) == bool(fits)
            assert takes(compiler, tokenizer, form, thought + text) == (bool(fits) and is_special)


def test_a_random_text_of_the_form_is_read_as_thought_and_answer(compiler, tokenizer):
    found = AnswerFormat.choose(None, thoughts="think")
    first = 'preamble: "a"? END\nEND: "</think>"'  # a short thought
    form = behind(FORMS['{"ok": true}'], first)
    texts = {text_of(compiler, form, seed) for seed in range(6)}
    for text in filter(None, texts):
        message = parse(found.parser("open", may_call=False), text)
        assert message.text in ('{"ok": true}', '{"ok":true}') and message.reasoning in ("", "a")


def test_a_preamble_alone_is_no_form():
    with pytest.raises(RequestError, match="exactly one of json_object"):
        StructuredOutput(preamble='preamble: "a"')


def test_a_preamble_that_cannot_be_read_is_refused(compiler):
    error = compiler.compile(StructuredOutput(regex="a", preamble="preamble: nowhere")).error
    assert error is not None and "cannot be used" in error
