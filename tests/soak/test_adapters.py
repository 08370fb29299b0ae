"""Seconds of the soak of adapters, so that it works and the worst shows at once."""

import sys

import pytest

from soak import adapters


def test_seconds_of_adapters_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.adapters", "--seconds", "4", "--seed", "1"])
    assert adapters.main() == 0, capsys.readouterr().out
    assert "no wrong answer and no leak" in capsys.readouterr().out
