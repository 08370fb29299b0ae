"""One engine of the fleet: real but for its clock, its device and the bytes of its tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from quire.engine.engine import Engine
from quire.engine.model_facts import ModelFacts, Observed
from quire.engine.observe.lifecycle import DECODE
from quire.engine.schedule.grouped_tiering import tiering_for
from quire.engine.schedule.no_tiers import NO_TIERS
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Request
from quire.errors import RequestError
from quire.kv.keys import Namespace
from quire.kv.prefix import PrefixCache
from quire.params import SamplingParams
from quire.simulate.clock import Clock
from quire.simulate.costs import StepCosts
from quire.simulate.fast_forward import FastForward, plan_fast_forward
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


@lru_cache(maxsize=4096)  # to check them takes as long as to plan a step
def _params(num_out: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_out, ignore_eos=True)


class Replica:
    """It takes requests at any time and acts when it is woken; it says when that is to be.

    While its steps are all alike it makes them at once: it wakes behind the last of them, or, if a
    request comes, at the end of the step that is then under way.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        costs: StepCosts,
        cache: PrefixCache,
        namespace: Namespace,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        store: TimedStore | None = None,
        fast_forwards: bool = True,
    ) -> None:
        self.number = number
        self.clock = clock
        self.runner = TimedRunner(clock, costs)
        self.num_refused = 0
        self.wakes_at: float | None = None  # None while it has nothing to do
        tiering = tiering_for(store, cache) if store is not None else NO_TIERS
        scheduler = Scheduler(
            cache, max_num_batched_tokens, max_num_seqs, tiering=tiering, clock=clock
        )
        self.engine = Engine(
            scheduler,
            self.runner,
            ModelFacts(VOCABULARY, max_model_len=cache.num_blocks * cache.block_size),
            seed=number,
            overlap=costs.machine.overlap,
            observed=Observed(namespace=namespace),
        )
        self.answered: list[Answered] = []
        self._fast_forwards = fast_forwards
        self._planned: FastForward | None = None
        self._inbox: list[tuple[int, Arrival]] = []
        self._num_sent = 0
        self._arrived: dict[int, float] = {}  # of requests that have not ended
        self._ended: list[int] = []
        self._idle_turns = 0

    # --- for the dispatcher -----------------------------------------------------------------------

    def send(self, arrival: Arrival) -> int:
        """Take a request; returns its number."""
        number = self._num_sent
        self._num_sent += 1
        self._inbox.append((number, arrival))
        if self.wakes_at is None:
            self.wakes_at = arrival.at
        elif self._planned is not None:
            self.wakes_at = self._planned.moment(self._planned.steps_before(arrival.at))
        return number

    def take_ended(self) -> list[int]:
        """Requests that were answered, or refused, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- time -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Act at `wakes_at`, and say when to be woken next; None if a request has to come first."""
        assert self.wakes_at is not None
        now = self.clock.now = self.wakes_at
        if self._planned is not None:
            planned, self._planned = self._planned, None
            planned.make(planned.steps_before(now))
        self._take_inbox()
        if not self.engine.has_unfinished_requests():
            self.wakes_at = now if self._ended else None  # the dispatcher has to hear of these
            return
        if self._fast_forwards:
            self._planned = plan_fast_forward(self.engine, self.runner, self.clock)
        if self._planned is not None:
            self.wakes_at = self._planned.moment(self._planned.num_steps)
            return
        ended = self.engine.advance()
        for request in ended:
            self._note_end(request)
        self.wakes_at = self.clock.now
        self._idle_turns = self._idle_turns + 1 if self.wakes_at == now else 0
        if self._idle_turns > MOST_IDLE_TURNS:
            raise RuntimeError(f"replica {self.number} stands still at {now:g} s")

    def _take_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for number, arrival in inbox:
            params = _params(arrival.num_out)
            try:
                request = self.engine.make_request(str(number), arrival.token_ids(), params)
            except RequestError:
                self.num_refused += 1
                self._ended.append(number)
                continue
            self._arrived[number] = arrival.at
            self.engine.submit(request)

    def _note_end(self, request: Request) -> None:
        number = int(request.id)
        first = next(moment for stage, moment in request.stages if stage == DECODE)
        self._ended.append(number)
        self.answered.append(
            Answered(
                replica=self.number,
                arrived=self._arrived.pop(number),
                first=first,
                ended=request.stages[-1][1],
                num_in=len(request.prompt_ids),
                num_out=request.sequences[0].num_output,
                cached=request.cached_tokens_by_tier,
            )
        )
        request.sequences.clear()  # a reference cycle would keep its tokens until a collection
