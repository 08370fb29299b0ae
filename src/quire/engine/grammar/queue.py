"""Whose grammar is compiled next: tenants take turns, whatever number each has asked for."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from quire.engine.grammar.grammar import Grammar


class CompileQueue:
    """A grammar that several tenants ask for waits in each one's line, and is taken once."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Grammar]] = OrderedDict()  # the next turn first
        self._busy: Counter[str] = Counter()  # how many of each tenant's are being compiled

    def add(self, tenant: str, grammar: Grammar) -> None:
        self._lines.setdefault(tenant, deque()).append(grammar)

    def take(self) -> tuple[str, Grammar] | None:
        """The next tenant's first grammar, of those tenants that have the fewest under way."""
        self._forget_unwanted()
        tenant = min(self._lines, key=lambda each: self._busy[each], default=None)
        if tenant is None:
            return None
        grammar = self._lines[tenant].popleft()
        self._lines.move_to_end(tenant)
        self._busy[tenant] += 1
        grammar.has_begun = True
        return tenant, grammar

    def done(self, tenant: str) -> None:
        self._busy[tenant] -= 1
        self._busy += Counter()  # without those at zero

    def _forget_unwanted(self) -> None:
        for tenant, line in list(self._lines.items()):
            while line and (line[0].has_begun or not line[0].is_wanted):
                line.popleft()
            if not line:
                del self._lines[tenant]
