"""Drafts in the engine: who gets some, what became of them, and whether that was worth it.

A running sequence whose tokens are all known may be given drafts. Its next chunk computes its last
token and the drafts, and draws a token behind each of them (`engine/draws/drafts.py`).

The host has to know what was drawn before it can plan on, so such a step is not overlapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.engine.draws.one_token import ONE_TOKEN
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.sequence import Sequence, Status
from quire.kv.index import TokenIds
from quire.speculative.controller import PLAIN_EVERY, Controller, StepTimes
from quire.speculative.draft_stats import DraftStats
from quire.speculative.drafter import Drafter, Wanted
from quire.speculative.mtp import MTPDrafter

log = logging.getLogger("quire")


@dataclass
class _Drafting:
    """One sequence, between the steps."""

    controller: Controller
    known: int  # tokens that were looked at
    wants: int = 0  # drafts for its next step


class Speculation:
    """Asks a drafter on behalf of the scheduler, and keeps it from losing time."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        new_controller: Callable[[], Controller] = Controller,
        plain_every: int = PLAIN_EVERY,
    ) -> None:
        """`plain_every` so many steps one goes without drafts, to know what they cost."""
        self.drafter = drafter
        self.most = most
        self.new_controller = new_controller
        self.plain_every = plain_every
        self.total = DraftStats()
        self.drafted_at = [0] * most  # by position: drafts that were computed behind right ones …
        self.accepted_at = [0] * most  # … and that were right
        self.times = StepTimes()
        self.is_off = False
        self._drafting: dict[Sequence, _Drafting] = {}
        self._steps = 0

    def propose(self, running: list[Sequence]) -> dict[Sequence, TokenIds]:
        """Drafts for the next step: for sequences that decode and whose tokens are all known."""
        decoding = [s for s in running if s.num_computed + 1 >= s.tokens.count]
        self.look(decoding)
        return self.drafts(s for s in decoding if s.num_drawn == 0)

    def without_awaiting(self, running: list[Sequence]) -> list[Sequence]:
        """All but those that wait until their tokens are known, to have drafts behind them."""
        return [s for s in running if not (s.num_drawn and self.wants(s))]

    def look(self, sequences: Iterable[Sequence]) -> None:
        """Before a step is planned: who would rather have drafts."""
        running = list(sequences)
        guessing = sum(state.wants > 0 for state in self._drafting.values())
        price = self.times.price(len(running), guessing or len(running))
        self._steps += 1
        is_plain = self._steps % self.plain_every == 0
        for sequence in running:
            if sequence.num_output == 0 or sequence.request.search is not None:
                continue
            state = self._drafting.get(sequence)
            if state is None:
                state = _Drafting(self.new_controller(), sequence.prompt_len)
                self._drafting[sequence] = state
            outlook = self.drafter.look(sequence, sequence.tokens.ids)
            state.controller.note(outlook.right, outlook.wrong)
            state.controller.passed(sequence.tokens.count - state.known)
            state.known = sequence.tokens.count
            state.wants = 0
            if outlook.is_ready and not is_plain:
                most = min(self.most, sequence.request.max_tokens - sequence.num_output - 1)
                state.wants = state.controller.length(max(most, 0), price)

    def wants(self, sequence: Sequence) -> bool:
        """Whether it waits until its tokens are known, to have drafts behind them."""
        state = self._drafting.get(sequence)
        return state is not None and state.wants > 0 and not self.is_off

    def drafts(self, sequences: Iterable[Sequence]) -> dict[Sequence, TokenIds]:
        """For those that want some, as far as their grammars allow."""
        asked = [s for s in sequences if self.wants(s) and s.table is not None]
        if not asked:
            return {}
        wanted = [
            Wanted(s, s.tokens.ids, self._drafting[s].wants, table)
            for s in asked
            if (table := s.table) is not None
        ]
        try:
            proposed = self.drafter.propose(wanted)
        except Exception:  # answers do not depend on drafts, so nor does the engine
            log.exception("The drafter failed; from here on there are no drafts.")
            self.is_off = True
            return {}
        sensible = {s: _sensible(s, drafts) for s, drafts in zip(asked, proposed, strict=True)}
        return {s: drafts for s, drafts in sensible.items() if len(drafts)}

    def keep_states(self, schedule: Schedule, states: Tensor) -> None:
        """A step is committed: what the MTP layer goes on from, behind each token it drew.

        Not for samples that have just forked off: the layer has seen the token of one of them.
        """
        assert isinstance(self.drafter, MTPDrafter)
        first = 0  # of the chunk's draws
        for chunk in schedule.chunks:
            sequence, draw = chunk.sequence, chunk.draw
            draws_alone = draw is ONE_TOKEN or draw.num_drafts > 0
            if draws_alone and sequence.status is not Status.FINISHED:
                newest = sequence.tokens.count - 1
                row = first + newest - (chunk.end - draw.count) - 1
                self.drafter.keep(sequence, states, row, sequence.tokens.count)
            first += draw.count

    def record_accepted(
        self, chunk: Chunk, accepted: int, num_sequences: int, seconds: float
    ) -> None:
        """A step with drafts is done: so many of this chunk's were right."""
        drafted, plain = chunk.draw.num_drafts, self.times.plain(num_sequences)
        for tally in (self.total, chunk.sequence.request.drafts):
            tally.add(drafted, accepted, seconds, plain)
        for position in range(min(accepted + 1, drafted)):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted
        if (state := self._drafting.get(chunk.sequence)) is not None:
            state.controller.note(accepted, int(accepted < drafted))

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """How long a step took, if it only decoded."""
        drafts = sum(chunk.draw.num_drafts for chunk in schedule.chunks)
        if schedule.num_tokens == len(schedule.chunks) + drafts:
            self.times.observe(len(schedule.chunks), drafts, seconds)

    def forget(self, sequence: Sequence) -> None:
        self._drafting.pop(sequence, None)
        self.drafter.forget(sequence)

    def stats(self) -> dict[str, Any]:
        return {
            **self.total.as_dict(),
            "steps": self.total.steps,
            "drafted_by_position": list(self.drafted_at),
            "accepted_by_position": list(self.accepted_at),
        }


class NoSpeculation:
    """No sequence has drafts, nor waits for any."""

    def propose(self, running: list[Sequence]) -> dict[Sequence, TokenIds]:
        return {}

    def without_awaiting(self, running: list[Sequence]) -> list[Sequence]:
        return running

    def keep_states(self, schedule: Schedule, states: Tensor) -> None: ...

    def record_accepted(
        self, chunk: Chunk, accepted: int, num_sequences: int, seconds: float
    ) -> None: ...

    def observe(self, schedule: Schedule, seconds: float) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {"drafted": 0, "accepted": 0}


NO_SPECULATION = NoSpeculation()


def _sensible(sequence: Sequence, drafts: TokenIds) -> TokenIds:
    """Without what can be of no use: behind an end, of a thought too, or against the grammar."""
    if (thought := sequence.open_thought) is not None:
        drafts = drafts[: thought.num_free_drafts(drafts)]
    stops = sequence.request.stop_ids
    ends = [i for i, token_id in enumerate(drafts.tolist()) if token_id in stops]
    if sequence.grammar is not None:
        drafts = drafts[: ends[0]] if ends else drafts
        return drafts[: sequence.grammar.num_valid(drafts)]
    return drafts[: ends[0] + 1] if ends else drafts
