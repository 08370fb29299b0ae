"""How a model's thoughts are marked, as token ids: what a budget for them is held by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checks import INT32_MAX, Check, whole

FEW_BEFORE = 3  # tokens of white space may stand before the tag that opens a thought


@dataclass(frozen=True)
class ThoughtMarkers:
    """`closes` is written where a budget is used up; its first token ends a thought by itself."""

    opens: tuple[int, ...]
    closes: tuple[int, ...]
    ends: tuple[int, ...] = ()  # no thought comes behind these
    is_open: bool = False  # the prompt ends within a thought
    comes_first: bool = True  # an answer begins with a thought, or has none; else there may be more

    def __post_init__(self) -> None:
        for name in ("opens", "closes", "ends"):
            ids = tuple(whole(each, 0, INT32_MAX) for each in getattr(self, name))
            if not ids and name != "ends":
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
