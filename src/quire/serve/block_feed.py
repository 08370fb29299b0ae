"""Which blocks a replica holds, for several readers that ask now and then what has changed."""

from __future__ import annotations

from collections import OrderedDict, deque

from quire.engine.process.messages import Message, pack_events
from quire.kv.events import BlockEvents

MOST_HELD = 1 << 20  # blocks told of; the latest
MOST_LOGGED = 1 << 16  # changes kept; a reader that asks for older ones gets all blocks anew


class BlockFeed:
    """Positions count changes; a reader that knows nothing begins at 0."""

    def __init__(self, most_held: int = MOST_HELD, most_logged: int = MOST_LOGGED) -> None:
        self._most_held = most_held
        self._most_logged = most_logged
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._log: deque[tuple[bytes, bool]] = deque()  # a key, and whether it is held now
        self._first = 1  # the position before the log's first entry
        self.position = 1

    def apply(self, events: BlockEvents) -> None:
        if events.cleared:
            self._held.clear()
            self._log.clear()
            self.position += 1
            self._first = self.position
        for key in events.removed:
            if self._held.pop(key, self) is None:
                self._note(key, False)
        for key in events.stored:
            self._held[key] = None
            self._held.move_to_end(key)
            self._note(key, True)
            if len(self._held) > self._most_held:
                oldest, _ = self._held.popitem(last=False)
                self._note(oldest, False)

    def _note(self, key: bytes, is_held: bool) -> None:
        self._log.append((key, is_held))
        self.position += 1
        if len(self._log) > self._most_logged:
            self._log.popleft()
            self._first += 1

    def since(self, position: int) -> tuple[int, Message]:
        """Where this reader stands now, and what to tell it: the changes, or everything."""
        if not self._first <= position <= self.position:
            return self.position, pack_events(BlockEvents(True, (), list(self._held)))
        count = self.position - position
        last = dict(list(self._log)[len(self._log) - count :])  # of a key, only how it is now
        removed = [key for key, is_held in last.items() if not is_held]
        stored = [key for key, is_held in last.items() if is_held]
        return self.position, pack_events(BlockEvents(False, removed, stored))
