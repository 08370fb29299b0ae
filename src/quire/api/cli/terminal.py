"""Small manners of a terminal program: dim text, plain numbers, a Ctrl-C that stops one thing."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import TextIO


def dim(text: str, stream: TextIO) -> str:
    """Grey where `stream` is a terminal that shows colours; plain elsewhere."""
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() and "NO_COLOR" not in os.environ else text


def note(text: str) -> None:
    """A remark beside the output: on stderr, so that stdout holds nothing but the answer."""
    print(dim(text, sys.stderr), file=sys.stderr, flush=True)


def one_line(text: str, width: int = 72) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


class StopOnInterrupt:
    """While it is entered, the first Ctrl-C only sets `asked`; a second one interrupts at once.

    A KeyboardInterrupt in the middle of a step would leave the engine half-way through its books.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
