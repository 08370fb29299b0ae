"""Says once in the log, for each name, that requests have a field that Quire does not know."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger("quire.server")

MOST_NAMES = 100  # and no more lines than this: a client must not be able to fill the log
MOST_CHARS = 64  # of a name


class UnknownFieldLog:
    """The names that one server has logged; none is logged twice."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            short = name[:MOST_CHARS]
            if short not in self._logged and len(self._logged) < MOST_NAMES:
                self._logged.add(short)
                log.warning("The field %r is not known and was ignored (said once).", short)
