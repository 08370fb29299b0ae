"""What was on its way to the tiers at some moment, and whether it has arrived since."""

from __future__ import annotations

from quire.kv.job_queue import Handle
from quire.kv.puts import Put, Write
from quire.kv.store_protocol import Store


class WriteBarrier:
    """Made when the last block of interest was offered; asked now and then."""

    def __init__(self, store: Store) -> None:
        self._handles = store.handles
        self._puts = self._handles.of(Put)
        self._writes: list[Handle] | None = None

    def is_over(self) -> bool:
        """Written or given up: a tier that is slow, full or gone ends its writes within a bound."""
        if not all(put.done() for put in self._puts):
            return False
        if self._writes is None:  # a put begins them before it ends
            self._writes = self._handles.of(Write)
        return all(write.done() for write in self._writes)
