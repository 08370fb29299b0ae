"""When each request was where: the moments at which something happens to it.

The engine tells of these and of nothing in between; no token costs anything. `Lifecycle` keeps what
every request is asked for afterwards, the time of each stage; `Journal` keeps the whole story.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.schedule.chunk import Schedule
    from quire.engine.sequence import Request, Sequence

QUEUED, LOADING, PREFILL, DECODE = "queued", "loading", "prefill", "decode"
PREEMPTED, FINISHED = "preempted", "finished"

MOST_STAGES = 64  # a request that is preempted again and again shows its first ones


class Lifecycle:
    """Writes `Request.stages`: what the request was doing, each from some moment on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starting: set[Sequence] = set()  # admitted, and no token was drawn since

    @property
    def has_starting(self) -> bool:
        """Whether a sequence was admitted that has drawn no token since."""
        return bool(self._starting)

    def queued(self, request: Request) -> None:
        self._enter(request, QUEUED)

    def loading(self, sequence: Sequence, places: Listed[str]) -> None:
        """Blocks that lower tiers have are on their way: the tier of each."""
        self._stage(sequence, LOADING)

    def started(self, sequence: Sequence, cached: int, loaded: Listed[str]) -> None:
        """It runs, with `cached` tokens in its blocks; `loaded`: the tiers of the last of them."""
        self._starting.add(sequence)
        self._stage(sequence, PREFILL)

    def computed(self, schedule: Schedule) -> int:
        """A step is done; returns how many of its tokens are the first since an admission.

        While no sequence starts there is nothing to look for.
        """
        if not self._starting:
            return 0
        num_begun = 0
        for chunk in schedule.chunks:
            if chunk.sequence in self._starting:
                draw = chunk.draw
                if draw.count:
                    self._starting.discard(chunk.sequence)
                    num_begun += draw.count - draw.num_drafts
                self.prefilled(chunk.sequence, chunk.count, drawn=draw.count > 0)
        return num_begun

    def prefilled(self, sequence: Sequence, count: int, drawn: bool) -> None:
        """A chunk of its prompt is computed; `drawn`: its next token is known now."""
        if drawn:
            self._stage(sequence, DECODE)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """A further sample of the same prompt: it shares the blocks, or waits for a place."""

    def copied(self, sequence: Sequence, count: int) -> None:
        """Its last block was not its alone to write: it has a copy now."""

    def releasing(self, sequence: Sequence) -> None:
        """It is about to give back its blocks; why is said next."""
        self._starting.discard(sequence)

    def preempted(self, sequence: Sequence) -> None:
        """Others needed its blocks: it waits."""
        self._stage(sequence, PREEMPTED)

    def taken_back(self, sequence: Sequence) -> None:
        """The step that admitted it failed: it waits again."""
        self._stage(sequence, QUEUED)

    def finished(self, sequence: Sequence) -> None:
        if sequence.request.finished:
            self._enter(sequence.request, FINISHED)

    def reset(self, sequences: Listed[Sequence]) -> None:
        """All blocks are lost, and these begin again from the tokens they have."""
        self._starting.clear()
        for sequence in sequences:
            self._stage(sequence, QUEUED)

    def _stage(self, sequence: Sequence, stage: str) -> None:
        """A request's stages are those of its first sample."""
        if sequence.sample == 0:
            self._enter(sequence.request, stage)

    def _enter(self, request: Request, stage: str) -> None:
        stages = request.stages
        if len(stages) >= MOST_STAGES and stage != FINISHED:
            return
        stages.append((stage, self._clock()))
