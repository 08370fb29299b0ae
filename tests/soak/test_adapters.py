"""Seconds of the soak of adapters, so that it works and the worst shows at once."""

import sys

import pytest
from effort import effort

from soak import adapters


def test_seconds_of_adapters_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = effort("2", "4")
    monkeypatch.setattr(sys, "argv", ["soak.adapters", "--seconds", seconds, "--seed", "1"])
    assert adapters.main() == 0, capsys.readouterr().out
    assert "no wrong answer and no leak" in capsys.readouterr().out
