"""How fast prompts are computed, by the clock: what loading has to be faster than."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.kv.rates import Rates

PREFILL = "prefill"  # tokens a second
FEWEST_TOKENS = 128  # in steps of fewer the time is the weights', not the tokens'


class PrefillRate:
    """Watches steps end.

    The end of a step that draws nothing is not waited for, so its tokens are counted with those of
    the next step that does.
    """

    def __init__(self, rates: Rates | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rates = rates
        self._since = 0.0
        self._tokens = 0

    def begin(self) -> None:
        """A step begins, and none is under way."""
        self._since = self._clock()
        self._tokens = 0

    def computed(self, tokens: int, waited: bool) -> None:
        self._tokens += tokens
        if not waited:
            return
        now = self._clock()
        if self._rates is not None and self._tokens >= FEWEST_TOKENS:
            self._rates.observe(PREFILL, self._tokens, now - self._since)
        self._since, self._tokens = now, 0
