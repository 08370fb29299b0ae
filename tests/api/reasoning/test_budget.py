"""Which tokens bound a model's thoughts, and chats that are held by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import write_channels_model, write_thinking_model
from tokenizers import AddedToken

from quire import LLM, SamplingParams
from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.budget import with_budget
from quire.api.reasoning.python_chats import chat_params
from quire.errors import RequestError
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer
from quire.thinking import ThoughtMarkers

TAGS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
HELLO = [{"role": "user", "content": "Say hello."}]
ASKED = SamplingParams(thinking_token_budget=7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_model("smollm2", progress=False).tokenizer()
    found.backend.add_tokens([AddedToken(tag, special=True) for tag in TAGS])
    return Tokenizer(found.backend, found.special_tokens, found.chat_template)


def chosen(parser: str) -> AnswerFormat:
    return AnswerFormat.choose("", thoughts=parser)


@pytest.mark.parametrize("opening", ["free", "open"])
def test_tags(tokenizer: Tokenizer, opening):
    markers = with_budget(ASKED, chosen("think"), tokenizer, opening).thought_markers
    opens, closes = (tokenizer.backend.token_to_id(tag) for tag in TAGS[:2])
    assert (markers.opens, markers.closes) == ((opens,), (closes,))
    assert markers.is_open == (opening == "open") and markers.comes_first


def test_channels(tokenizer: Tokenizer):
    markers = with_budget(ASKED, chosen("harmony"), tokenizer, "free").thought_markers
    assert tokenizer.decode(markers.opens, False) == "<|channel|>analysis<|message|>"
    assert tokenizer.decode(markers.closes, False) == "<|end|><|start|>assistant<|channel|>"
    assert tokenizer.decode(markers.ends, False) == "<|channel|>final"
    assert not markers.comes_first
    assert {tokenizer.decode([each], False) for each in markers.between} == {
        "<|channel|>",
        "<|end|>",
        "<|start|>",
    }


def test_without_a_thought_there_is_no_budget(tokenizer: Tokenizer):
    for parser, opening in [("off", "free"), ("think", "closed")]:
        held = with_budget(ASKED, chosen(parser), tokenizer, opening)
        assert held.thinking_token_budget is None
    assert with_budget(SamplingParams(), chosen("think"), tokenizer, "open") == SamplingParams()


def test_a_chat_with_a_model_that_does_not_think_is_within_any_budget():
    """A budget holds in Python as over HTTP; completions have none: nothing marks thoughts."""
    assert chat_params(ASKED, None).thinking_token_budget is None
    marked = replace(ASKED, thought_markers=ThoughtMarkers((1,), (2,)))
    assert chat_params(marked, None) == marked


def test_tags_that_are_no_tokens_are_told(tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="cannot be held"):
        with_budget(ASKED, chosen("seed_oss"), tokenizer, "free")
    held = with_budget(ASKED, chosen("seed_oss"), tokenizer, "free", is_wish=True)
    assert held.thinking_token_budget is None


SETTINGS = {"load_format": "dummy", "num_blocks": 64, "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path):
    folder = write_thinking_model(tmp_path_factory.mktemp("thinking"), smollm2_path)
    with LLM(str(folder), use_tqdm=False, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("form", [None, {"regex": "yes|no"}])
def test_a_chat_answers_when_its_budget_is_used_up(llm: LLM, form):
    params = SamplingParams(
        max_tokens=40, seed=1, n=4, thinking_token_budget=9, structured=form, ignore_eos=not form
    )
    [output] = llm.chat(HELLO, params, use_tqdm=False)
    for answer in output.outputs:
        assert answer.token_ids.index(4) == 9
        assert answer.reasoning and answer.text.strip()
        assert form is None or answer.text in ("yes", "no")
    [silent] = llm.chat(
        HELLO, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert silent.outputs[0].reasoning is None


def test_a_model_with_channels_goes_on_to_another_message(tmp_path: Path, smollm2_path: Path):
    """It would think for ever: the tag that ends a message does not come by itself."""
    folder = write_channels_model(tmp_path, smollm2_path)
    with LLM(str(folder), use_tqdm=False, **SETTINGS) as llm:
        tags = ("<|channel|>", "<|message|>", "<|end|>")
        channel, message, end = (llm.tokenizer.backend.token_to_id(tag) for tag in tags)
        [analysis] = llm.tokenizer.encode("analysis", False)
        params = SamplingParams(
            max_tokens=40,
            seed=1,
            thinking_token_budget=9,
            structured={"regex": "yes|no"},
            logit_bias={analysis: 100.0, end: -100.0},
        )
        [output] = llm.chat(HELLO, params, use_tqdm=False)
    [answer] = output.outputs
    assert answer.token_ids[:3] == [channel, analysis, message]
    assert answer.token_ids.index(end) == 3 + 9  # behind the header
    assert answer.text in ("yes", "no") and answer.reasoning


def test_a_thought_is_held_whose_header_is_spelled_otherwise(tmp_path: Path, smollm2_path: Path):
    """The grammar of a form takes them, and they say the same."""
    folder = write_channels_model(tmp_path, smollm2_path)
    with LLM(str(folder), use_tqdm=False, **SETTINGS) as llm:
        tags = ("<|message|>", "<|end|>")
        message, end = (llm.tokenizer.backend.token_to_id(tag) for tag in tags)
        [analysis], [first] = (llm.tokenizer.encode(word, False) for word in ("analysis", "a"))
        params = SamplingParams(
            max_tokens=60,
            seed=1,
            thinking_token_budget=9,
            structured={"regex": "yes|no"},
            logit_bias={first: 100.0, end: -100.0},
        )
        [output] = llm.chat(HELLO, params, use_tqdm=False)
    [answer] = output.outputs
    assert answer.token_ids[1] == first and analysis not in answer.token_ids
    assert answer.token_ids.index(end) == answer.token_ids.index(message) + 1 + 9
    assert answer.text in ("yes", "no") and answer.reasoning
