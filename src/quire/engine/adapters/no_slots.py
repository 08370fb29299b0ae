"""In the place of `AdapterSlots`, where a model is computed without adapters."""

from __future__ import annotations

from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.queues import Queues
from quire.engine.sequence import Sequence
from quire.runner.plan import StepPlan


class NoSlots:
    """No sequence needs a slot."""

    def begin_walk(self, queues: Queues) -> None: ...

    def admits(self, sequence: Sequence) -> bool:
        return True

    def admitted(self, sequence: Sequence) -> None: ...

    def first(self, queues: Queues) -> Sequence | None:
        return queues.waiting.first

    def load(self, schedule: Schedule, plan: StepPlan) -> StepPlan:
        return plan


NO_SLOTS = NoSlots()
