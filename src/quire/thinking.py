"""How a model's thoughts are marked, as token ids: what a budget for them is held by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checks import INT32_MAX, Check, whole

FEW_BEFORE = 3  # tokens of white space may stand before the tag that opens a thought
# Of models with channels: what the headers of their messages say.
LONGEST_HEADER = 512
CHANNEL, FUNCTIONS, ANALYSIS, FINAL = "<|channel|>", "functions.", "analysis", "final"
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def is_thought(header: str) -> bool:
    """Whether a message is a thought: on its channel, and no call of a function."""
    recipient = RECIPIENT.search(header)
    is_call = recipient is not None and recipient[1].startswith(FUNCTIONS)
    return channel_of(header) == ANALYSIS and not is_call


def channel_of(header: str) -> str | None:
    channel = CHANNEL_NAME.search(header)
    return None if channel is None else channel[1]


@dataclass(frozen=True)
class ThoughtMarkers:
    """`closes` is written where a budget is used up; its first token ends a thought by itself.

    With `between`, the tokens behind which a message has a header, what that says decides whether
    the message is a thought, however it is spelled: `opens` is its usual spelling, which begins
    with the tag of a channel and ends with the one behind a header.
    """

    opens: tuple[int, ...]
    closes: tuple[int, ...]
    ends: tuple[int, ...] = ()  # no thought comes behind these
    is_open: bool = False  # the prompt ends within a thought
    comes_first: bool = True  # an answer begins with a thought, or has none; else there may be more
    between: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("opens", "closes", "ends", "between"):
            ids = tuple(whole(each, 0, INT32_MAX) for each in getattr(self, name))
            if not ids and name in ("opens", "closes"):
                raise ValueError(f"{name} is empty")
            object.__setattr__(self, name, ids)


def thought_markers() -> Check:
    def accept(value: Any) -> ThoughtMarkers:
        if isinstance(value, ThoughtMarkers):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(value)
        return ThoughtMarkers(**value)

    return Check('ThoughtMarkers, or a dict such as {"opens": [5], "closes": [6]}', accept)
