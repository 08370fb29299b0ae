"""Puts the next tokens of a sequence into the step that is being planned."""

from __future__ import annotations

from quire.engine.draws.next_draw import next_chunk
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence
from quire.kv.index import TokenIds


class ChunkPlanner:
    """Moves counters and publishes blocks as if the step were done."""

    def __init__(self, queues: Queues, prefixes: Prefixes) -> None:
        self.queues = queues
        self.prefixes = prefixes
        self.num_copied_blocks = 0  # because others held them, too

    def add(
        self, sequence: Sequence, count: int, schedule: Schedule, drafts: TokenIds | None = None
    ) -> Chunk:
        """The caller has seen to it that there are blocks for `count` tokens, and the drafts."""
        chunk, table = next_chunk(sequence, count, drafts), sequence.table
        assert table is not None
        count, draw = chunk.count, chunk.draw
        if copies := table.append(count):
            schedule.copies += copies
            self.num_copied_blocks += len(copies)
            self.queues.watch.copied(sequence, len(copies))
        sequence.num_computed = computed = chunk.start + count
        if draw.count:
            sequence.num_drawn += 1
            sequence.awaits_draw = draw.holds_sequence
            if draw.is_awaited:
                schedule.is_awaited = True
        sequence.last_step = schedule.number
        if self.prefixes.publishable(sequence, computed):
            chunk.num_published = self.prefixes.publish(sequence, computed)
            schedule.published.update(sequence.nodes[-chunk.num_published :])
        schedule.chunks.append(chunk)
        schedule.num_tokens += count
        return chunk
