"""What is told on stderr while something takes long: a bar where one can be drawn, else lines."""

from __future__ import annotations

import sys


def draws_bars() -> bool:
    """A terminal and a notebook draw a line anew; a file or a pipe would keep every state of it."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def say(line: str) -> None:
    """One line at once, also where stderr is a file or a pipe."""
    print(line, file=sys.stderr, flush=True)


def say_step(line: str) -> None:
    """One step of what the line before it announced."""
    say(f"  {line}")


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
