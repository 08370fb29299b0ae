"""One engine of the fleet: real but for its clock, its device and the bytes of its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Request
from quire.engine.tiering import Tiering
from quire.engine.watch import DECODE, FINISHED
from quire.errors import RequestError
from quire.kv.prefix import PrefixCache
from quire.params import SamplingParams
from quire.simulate.clock import Clock
from quire.simulate.costs import StepCosts
from quire.simulate.leap import Leap, find_leap
from quire.simulate.runner import FIRST_DRAWN, TimedRunner
from quire.simulate.store import TimedStore
from quire.simulate.trace import Arrival

VOCABULARY = 2 * FIRST_DRAWN - 1
MOST_IDLE_TURNS = 10_000  # of an engine that neither computes nor waits: it would do so for ever


@dataclass(frozen=True)
class Answered:
    """What became of a request."""

    replica: int
    arrived: float
    first: float  # when its first token was there
    ended: float
    num_in: int
    num_out: int
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens, by tier


class Replica:
    """It takes requests at any time and acts when it is woken; it says when that is to be.

    While its steps are all alike it leaps: it wakes behind the last of them, or, if a request comes,
    at the end of the step that is then under way.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        costs: StepCosts,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        store: TimedStore | None = None,
        leaps: bool = True,
    ) -> None:
        self.number = number
        self.clock = clock
        self.runner = TimedRunner(clock, costs)
        self.num_refused = 0
        self.wakes_at: float | None = None  # None while it has nothing to do
        tiering = Tiering(store, cache) if store is not None else None
        scheduler = Scheduler(
            cache, max_num_batched_tokens, max_num_seqs, tiering=tiering, clock=clock
        )
        self.engine = Engine(
            scheduler,
            self.runner,
            tokenizer=None,
            vocab_size=VOCABULARY,
            max_model_len=cache.num_blocks * cache.block_size,
            eos_token_ids=(),
            seed=number,
            overlap=costs.machine.overlap,
        )
        self._leaps = leaps
        self._leap: Leap | None = None
        self._inbox: list[Arrival] = []
        self._arrived: dict[str, float] = {}
        self._num_taken = 0
        self._idle_turns = 0

    def send(self, arrival: Arrival) -> None:
        self._inbox.append(arrival)
        if self.wakes_at is None:
            self.wakes_at = arrival.at
        elif self._leap is not None:
            self.wakes_at = self._leap.moment(self._leap.steps_before(arrival.at))

    def wake(self) -> list[Answered]:
        """Act at `wakes_at`; returns the requests that ended."""
        assert self.wakes_at is not None
        now = self.wakes_at
        if self._leap is not None:
            leap, self._leap = self._leap, None
            leap.make(leap.steps_before(now))
        self.clock.now = now
        self._take_inbox()
        ended = [self._answered(request) for request in self.engine.advance()]
        self._plan_next(now)
        return ended

    def _take_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for arrival in inbox:
            name = str(self._num_taken)
            self._num_taken += 1
            params = SamplingParams(max_tokens=arrival.num_out, ignore_eos=True)
            try:
                request = self.engine.make_request(name, arrival.token_ids(), params)
            except RequestError:
                self.num_refused += 1
                continue
            self._arrived[name] = arrival.at
            self.engine.submit(request)

    def _plan_next(self, before: float) -> None:
        if not self.engine.has_unfinished_requests():
            self.wakes_at = self._inbox[0].at if self._inbox else None
            return
        self.wakes_at = self.clock.now
        self._idle_turns = self._idle_turns + 1 if self.clock.now == before else 0
        if self._idle_turns > MOST_IDLE_TURNS:
            raise RuntimeError(f"replica {self.number} stands still at {before:g} s")
        if self._leaps:
            self._leap = find_leap(self.engine, self.clock)
            if self._leap is not None:
                self.wakes_at = self._leap.moment(self._leap.num_steps)

    def _answered(self, request: Request) -> Answered:
        moments = dict(reversed(request.stages))  # the first time of each
        return Answered(
            replica=self.number,
            arrived=self._arrived.pop(request.id),
            first=moments[DECODE],
            ended=request.stages[-1][1] if request.stages[-1][0] == FINISHED else self.clock.now,
            num_in=len(request.prompt_ids),
            num_out=request.sequences[0].num_output,
            cached=request.cached_tokens_by_tier,
        )


def total_busy(replicas: Sequence[Replica]) -> float:
    return sum(replica.runner.busy for replica in replicas)
