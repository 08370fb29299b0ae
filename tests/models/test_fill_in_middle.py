"""Prompts with a hole, as each family has them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from quire.errors import RequestError
from quire.models.source import open_model
from quire.models.text.fill_in_middle import FAMILIES, fill_in_middle
from quire.models.text.tokenizer import Tokenizer


def with_marks(marks=()) -> Tokenizer:
    found = open_model("smollm2", progress=False).tokenizer()
    found.backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(found.backend, found.special_tokens, None)


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.before)
def test_the_parts_stand_behind_their_marks(marks):
    tokenizer = with_marks(marks.tokens())
    ids = fill_in_middle(tokenizer, "def f():\n    ", "\n    return x")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    first, second = f"{marks.before}def f():\n    ", f"{marks.behind}\n    return x"
    both = second + first if marks.suffix_first else first + second
    assert text == both + (marks.middle or "")


def test_a_mark_that_the_text_spells_is_text():
    marks = FAMILIES[0]
    tokenizer = with_marks(marks.tokens())
    ids = fill_in_middle(tokenizer, f"a{marks.behind}", "b")
    assert ids.count(tokenizer.backend.token_to_id(marks.behind)) == 1


def test_a_model_without_marks_refuses():
    with pytest.raises(RequestError, match="fill-in-the-middle"):
        fill_in_middle(with_marks(), "a", "b")
