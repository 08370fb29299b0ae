"""How long tests wait for what must come about.

A test that waits asserts that something happens, never how soon: a machine with four times as much
to do as usual is no failure. Where a wait has to be shown to be bounded, it is compared with a wait
that would never end, so that the bound may be generous too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0

T = TypeVar("T")


def eventually(
    look: Callable[[], T],
    says: str = "it did not come about",
    *,
    despite: tuple[type[Exception], ...] = (),
) -> T:
    """What `look` gives as soon as that is something; it may fail in these ways `despite` that.

    It looks less and less often, so that looking leaves the machine to what is waited for.
    """
    end, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while True:
        try:
            if seen := look():
                return seen
        except despite:
            assert time.monotonic() < end, says
        assert time.monotonic() < end, says
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)
