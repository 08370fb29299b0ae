"""Answers in a terminal: thoughts are beside the words."""

from __future__ import annotations

import pytest

from quire.api.cli.screen import Screen
from quire.api.tools.harmony import HarmonyParser

ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def test_thoughts_are_shown_beside_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(HarmonyParser())
    for letter in ANSWER:
        screen.show(letter)
    screen.end()
    assert capsys.readouterr() == ("Yes.\n", "Hm.")
    assert screen.words == "Yes."


def test_without_channels_all_is_words(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(None)
    screen.show(ANSWER)
    screen.end()
    assert capsys.readouterr() == (f"{ANSWER}\n", "")
    assert screen.words == ANSWER
