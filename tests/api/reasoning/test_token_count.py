"""How many tokens of an answer were thoughts."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.token_count import thought_counter
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer

TAGS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_model("smollm2", progress=False).tokenizer()
    found.backend.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return Tokenizer(found.backend, found.special_tokens, found.chat_template)


CASES = [
    # parser, how the answer begins, thoughts with their tags, what comes behind
    ("think", "free", "<think>Hm. Well.</think>", "\n\nYes."),
    ("think", "free", "", "Yes, it </think> is <think>"),
    ("think", "open", "Hm. Well.</think>", "Yes </think>."),
    ("think", "open", "Hm. Cut", ""),
    ("think", "closed", "", "Yes."),
    ("deepseek_r1", "open", "Hm.</think>", "Yes."),
    (
        "harmony",
        "free",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "<|start|>assistant<|channel|>final<|message|>Yes.",
    ),
    ("harmony", "free", "", "<|channel|>final<|message|>Yes."),
    (
        "harmony",
        "free",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "<|start|>assistant<|channel|>analysis to=functions.f json<|message|>{}",
    ),
    (
        "harmony",
        "free",
        "<|channel|>analysis<|message|>Hm.<|channel|>analysis<|message|>Well.",
        "<|channel|>final<|message|>Yes.",
    ),
    (
        "harmony",
        "free",
        "<|channel|>analysis<|message|>Hm.",
        "<|start|>assistant<|channel|>final<|message|>Yes.",
    ),
]


@pytest.mark.parametrize(("name", "opening", "thoughts", "rest"), CASES)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thoughts_are_counted_in_any_pieces(tokenizer, name, opening, thoughts, rest, step):
    counter = thought_counter(AnswerFormat.choose(None, thoughts=name), tokenizer, opening)
    first = tokenizer.encode(thoughts, add_special_tokens=False)
    ids = first + tokenizer.encode(rest, add_special_tokens=False)
    for start in range(0, len(ids), step):
        counter.push(ids[start : start + step])
    assert counter.count == len(first)


def test_a_later_thought_in_channels_counts_too(tokenizer):
    counter = thought_counter(AnswerFormat.choose(None, thoughts="harmony"), tokenizer, "free")
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    once = len(tokenizer.encode(thought, add_special_tokens=False))
    between = len(tokenizer.encode("<|start|>assistant", add_special_tokens=False))
    counter.push(tokenizer.encode(f"{thought}<|start|>assistant{thought}"))
    assert counter.count == 2 * once + between


def test_a_tag_of_several_tokens_cannot_be_counted(tokenizer):
    found = AnswerFormat.choose(None, thoughts="seed_oss")
    assert thought_counter(found, tokenizer, "free") is None
    assert thought_counter(AnswerFormat.choose("{{ messages }}"), tokenizer, "free") is None
