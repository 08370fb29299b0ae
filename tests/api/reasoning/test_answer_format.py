"""Which parser a model has: by its chat template, by a setting, and by the prompt's end."""

from __future__ import annotations

import pytest

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.names import PARSER_NAMES
from quire.api.reasoning.tags import TAGS, choose_tags
from quire.api.tools.events import Call, ParsedMessage
from quire.api.tools.harmony import HarmonyParser
from quire.api.tools.parser import WordsParser, parse
from quire.models.source import open_model

QWEN3 = "{{ message.content.split('</think>')[-1] }} <tool_call> <|im_start|>assistant"
MAGISTRAL = "[TOOL_CALLS] [THINK]{{ thinking }}[/THINK]"
HARMONY = "<|channel|>analysis<|message|>{{ message.thinking }}"


@pytest.fixture(scope="module")
def tokenizer():
    return open_model("smollm2", progress=False).tokenizer()


TEMPLATES = [
    (QWEN3, TAGS["think"], "hermes"),
    (MAGISTRAL, TAGS["mistral"], "mistral"),
    ("<seed:think>{{ reasoning }}</seed:think>", TAGS["seed_oss"], "hermes"),
    (HARMONY, None, "harmony"),
    ("{{ messages }}", None, "hermes"),
    (None, None, "hermes"),
]


@pytest.mark.parametrize(("template", "tags", "calls"), TEMPLATES)
def test_the_template_shows_it(template, tags, calls):
    found = AnswerFormat.choose(template)
    assert (found.thoughts, found.calls.name) == (tags, calls)
    assert found.has_thoughts == (tags is not None or calls == "harmony")


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("is_set", [True, False], ids=["off", "merged"])
def test_thoughts_of_channels_are_left_in_the_words(is_set, size):
    channels = AnswerFormat.choose(HARMONY)
    found = AnswerFormat.choose(HARMONY, thoughts="off") if is_set else channels.merged()
    assert found.merges and not channels.merges

    def read(text):
        parser = found.parser()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.push(piece)]
        message = ParsedMessage.of([*events, *parser.flush()])
        assert parser.num_calls == len(message.calls)
        return message

    final = "<|channel|>final<|message|>Yes. Well.<|return|>"
    assert read(THOUGHT + final) == ParsedMessage("Hm.\n\nYes. Well.")
    assert read(final) == ParsedMessage("Yes. Well.")
    assert read(THOUGHT) == ParsedMessage("Hm.")
    words = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert read(THOUGHT + words + THOUGHT + final).text == "Hm.\n\nI look.\n\nHm.\n\nYes. Well."
    called = f"{THOUGHT}{CALL}<|start|>assistant{final}"
    assert read(called) == ParsedMessage("Hm.\n\nYes. Well.", [Call("f", '{"a": 1}')])
    assert read(THOUGHT + CALL) == ParsedMessage("Hm.", [Call("f", '{"a": 1}')])


@pytest.mark.parametrize("name", PARSER_NAMES)
def test_every_name_is_a_parser(name):
    found = AnswerFormat.choose("{{ messages }}", thoughts=name)
    assert found.has_thoughts
    if found.thoughts is not None:
        text = f"{found.thoughts.open}Hm.{found.thoughts.close}Yes."
        assert parse(found.parser(may_call=False), text) == ParsedMessage("Yes.", [], "Hm.")


def test_a_setting_comes_before_the_template():
    assert AnswerFormat.choose(QWEN3, thoughts="off").thoughts is None
    assert choose_tags(QWEN3, "seed_oss") is TAGS["seed_oss"]
    assert AnswerFormat.choose(QWEN3, thoughts="openai_gptoss").calls.name == "harmony"
    assert AnswerFormat.choose(HARMONY, thoughts="off").calls.has_channels  # they are no tags


ENDS = [
    # of a prompt, and what "Hm.</think>Yes." is behind it: thoughts, words
    ("<|im_start|>assistant\n", "", "Hm.</think>Yes."),
    ("<|im_start|>assistant\n<think>\n", "Hm.", "Yes."),
    ("<｜Assistant｜><think>", "Hm.", "Yes."),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "Hm.</think>Yes."),
    ("<｜Assistant｜></think>", "", "Hm.</think>Yes."),
    ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "", "Hm.</think>Yes."),
]


@pytest.mark.parametrize(("prompt_end", "thoughts", "words"), ENDS)
def test_the_prompt_shows_whether_a_thought_is_open(tokenizer, prompt_end, thoughts, words):
    found = AnswerFormat.choose(QWEN3)
    ids = tokenizer.encode(prompt_end, add_special_tokens=False)
    made = found.parser(found.opening(tokenizer, ids))
    assert parse(made, "Hm.</think>Yes.") == ParsedMessage(words, [], thoughts)


def test_deepseek_r1_thinks_at_once_unless_the_prompt_has_closed_its_thought():
    found = AnswerFormat.choose(None, thoughts="deepseek_r1")
    assert found.thoughts is not None
    assert found.thoughts.opening("Assistant:") == "open"
    assert found.thoughts.opening("<think></think>\n") == "closed"


@pytest.mark.parametrize("name", ["think", "deepseek_r1"])
@pytest.mark.parametrize(
    ("begun", "opening"),
    [("", "closed"), ("Yes, ", "closed"), ("<think>Hm, ", "open"), ("<think>a</think>b", "closed")],
)
def test_an_answer_that_was_begun_goes_on_as_it_began(tokenizer, name, begun, opening):
    found = AnswerFormat.choose(None, thoughts=name)
    assert found.opening(tokenizer, [1, 2], begun) == opening


def test_without_tools_calls_are_words_but_channels_are_read():
    assert isinstance(AnswerFormat.choose(None).parser(may_call=False), WordsParser)
    assert isinstance(AnswerFormat.choose(HARMONY).parser(may_call=False), HarmonyParser)
