"""Control of an engine's cache by calls: more of them than are kept fail none that is under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from quire.engine.engine import Engine
from quire.engine.observe.cache_control import MOST_OPEN, CacheCalls
from quire.kv.control import Control


class Calls(CacheCalls):
    """Of an engine whose tiers end what `under_way` has when the test says so."""

    def __init__(self) -> None:
        parts = SimpleNamespace(cache=None, tiering=None)
        super().__init__(cast("Engine", SimpleNamespace(scheduler=parts)))
        self.under_way: list[Control] = []

    def pin(self, tokens: list[int], salt: str, seconds: float) -> dict[str, Any]:
        self.under_way.append(Control())
        return self._begun(self.under_way[-1], None)


def test_what_is_under_way_is_not_forgotten_for_what_comes() -> None:
    calls = Calls()
    named = calls.named()

    def pin() -> int | None:
        number: int | None = named["cache_pin"](tokens=[1], salt="", seconds=1.0)["number"]
        return number

    numbers = [pin() for _ in range(MOST_OPEN)]
    assert pin() is None and len(calls.under_way) == MOST_OPEN  # it was not begun
    assert [named["cache_result"](number=number) for number in numbers] == [None] * MOST_OPEN
    calls.under_way[3].end()
    assert pin() is not None  # in the place of a result that was not asked for
    assert named["cache_result"](number=numbers[3]) == {}
    calls.under_way[0].end()
    assert named["cache_result"](number=numbers[0]) == {"device": None}
    assert pin() is not None and pin() is None
