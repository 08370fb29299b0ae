"""An answer in the terminal, as it grows: words on stdout, thoughts in grey beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.api.cli.terminal import dim
from quire.api.tools.events import Event, Reasoning, Text
from quire.api.tools.parser import AnswerParser


class Screen:
    """Shows one answer; `parser` tells thoughts from words, in a model that thinks."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self._parser = parser
        self.words = ""

    def show(self, text: str) -> None:
        self._print([Text(text)] if self._parser is None else self._parser.push(text))

    def end(self) -> None:
        if self._parser is not None:
            self._print(self._parser.flush())
        print()

    def _print(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                print(event.text, end="", flush=True)
                self.words += event.text
            elif isinstance(event, Reasoning):
                print(dim(event.text, sys.stderr), end="", file=sys.stderr, flush=True)
