"""Where each sequence is: waiting without blocks, or running with some."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quire.engine.adapters.adapter import Adapter
from quire.engine.observe.lifecycle import Lifecycle
from quire.engine.schedule.no_tiers import NoTiers
from quire.engine.schedule.tiering import Tiering
from quire.engine.schedule.waiting_queue import WaitingQueue
from quire.engine.sequence import Sequence, Status


class Queues:
    """Moves sequences between the queues, and gives the blocks back of those that leave."""

    def __init__(
        self,
        waiting: WaitingQueue,
        tiering: Tiering | NoTiers,
        max_num_seqs: int,
        clock: Callable[[], float],
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.max_num_seqs = max_num_seqs
        self.watch = Lifecycle(clock)
        self.num_preemptions = 0
        self._tiering = tiering

    @property
    def loading(self) -> Collection[Sequence]:
        """Sequences that hold blocks, which are being filled from lower tiers."""
        return self._tiering.loading.keys()

    @property
    def num_admitted(self) -> int:
        return len(self.running) + len(self.loading)

    def adapters_in_use(self) -> set[Adapter]:
        """Those of sequences that hold blocks."""
        adapters = (sequence.request.adapter for sequence in (*self.running, *self.loading))
        return {adapter for adapter in adapters if adapter is not None}

    def run(self, sequence: Sequence) -> None:
        """It has its blocks."""
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Others need its blocks: it waits, and begins again from the tokens it has."""
        self.num_preemptions += 1
        self.to_waiting(sequence)
        self.watch.preempted(sequence)

    def preempt_youngest(self) -> bool:
        """Give up one running sequence, if it is not the only one; for when memory is short."""
        if len(self.running) < 2:
            return False
        self.preempt(max(self.running, key=self.waiting.order))
        return True

    def to_waiting(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.discard(sequence)

    def reset(self, sequences: list[Sequence]) -> None:
        """All blocks are lost: these wait, and nothing runs."""
        self.waiting.clear()
        self.running.clear()
        for sequence in sequences:
            sequence.table, sequence.num_computed, sequence.nodes = None, 0, []
            sequence.num_drawn = sequence.num_offered = 0
            sequence.status = Status.WAITING
            self.waiting.add(sequence)
        self.watch.reset(sequences)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.watch.releasing(sequence)
        sequence.table.truncate(0)
        sequence.table = None
        sequence.num_computed = sequence.num_offered = 0
