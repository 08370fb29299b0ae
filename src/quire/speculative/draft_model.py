"""Guesses by a smaller model: its likeliest tokens, computed one step after the other.

It has a small pool of pages of its own, and its KV is kept in step with the sequence: what it has
computed of guesses that came true stays, the rest is given back. All its steps are launched behind
each other, each fed with what the last one drew; the host waits once, for the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kv.allocator import BlockAllocator
from quire.kv.index import TokenIds
from quire.kv.table import BlockTable
from quire.params import SamplingParams
from quire.runner.plan import GroupTables, Ints, StepPlan
from quire.runner.runner import LaunchedStep, ModelRunner
from quire.runner.sampling.sampler import SampleRow
from quire.speculative.drafter import NO_TOKENS, Outlook, Wanted

GREEDY = SamplingParams(temperature=0)


@dataclass
class _Pages:
    """A sequence's blocks, and which of its tokens they hold."""

    table: BlockTable
    num_known: int = 0  # tokens of the sequence that have KV here …
    guessed: TokenIds = field(default_factory=lambda: NO_TOKENS)  # … and guesses behind them


@dataclass(frozen=True)
class _Work:
    """The next tokens of one sequence, and the guesses wanted behind them."""

    pages: _Pages
    token_ids: TokenIds
    start: int
    most: int


class DraftModel:
    """A model, a pool, and the pages of every sequence that it guesses for."""

    def __init__(self, runner: ModelRunner, max_tokens: int, max_len: int) -> None:
        """`max_tokens` of its steps; sequences of `max_len` tokens or more get no guesses."""
        self._runner = runner
        self._max_tokens = max_tokens
        self._max_len = max_len
        self._block_size = runner.cache.layout.block_size
        self._allocator = BlockAllocator(runner.cache.num_blocks)
        self._pages: dict[Hashable, _Pages] = {}  # the longest unused first

    def look(self, name: Hashable, token_ids: TokenIds) -> Outlook:
        return Outlook(is_ready=len(token_ids) < self._max_len)

    def forget(self, name: Hashable) -> None:
        if (pages := self._pages.pop(name, None)) is not None:
            pages.table.truncate(0)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        """Those whose tokens do not all fit into a step catch up, and get their guesses later."""
        places: list[int] = []
        work: list[_Work] = []
        budget, names = self._max_tokens, {each.name for each in wanted}
        for place, (name, token_ids, most, _) in enumerate(wanted):
            each = self._prepare(name, token_ids, most, budget, names)
            if each is not None:
                places.append(place)
                work.append(each)
                budget -= len(each.token_ids)
        guesses = [NO_TOKENS] * len(wanted)
        if work:
            for place, guess in zip(places, self._guess(work), strict=True):
                guesses[place] = guess
        return guesses

    def _prepare(
        self, name: Hashable, token_ids: TokenIds, most: int, budget: int, busy: set[Hashable]
    ) -> _Work | None:
        """Room for its next tokens and guesses; None if there is none, or nothing to do."""
        pages = self._pages.pop(name, None)
        if pages is None:
            pages = _Pages(BlockTable(self._allocator, self._block_size))
        self._pages[name] = pages
        start = self._keep(pages, token_ids)
        count = min(len(token_ids) - start, budget)
        is_last = start + count == len(token_ids)
        most = min(most, self._max_len - len(token_ids)) if is_last else 0
        if count <= 0:
            return None
        if not self._make_room(pages.table, count + max(most - 1, 0), busy):
            return None
        return _Work(pages, token_ids[start : start + count], start, most)

    def _keep(self, pages: _Pages, token_ids: TokenIds) -> int:
        """Give back what did not come true; how many tokens have KV. The last never has."""
        came = token_ids[pages.num_known : pages.num_known + len(pages.guessed)]
        wrong = np.flatnonzero(came != pages.guessed[: len(came)])
        right = int(wrong[0]) if len(wrong) else len(came)
        kept = min(pages.num_known + right, len(token_ids) - 1)
        pages.table.truncate(kept)
        pages.num_known, pages.guessed = kept, NO_TOKENS
        return kept

    def _make_room(self, table: BlockTable, count: int, busy: set[Hashable]) -> bool:
        """Take pages from sequences that have not asked for the longest time, if there are any."""
        idle = [name for name in self._pages if name not in busy]
        while table.blocks_needed(count) > self._allocator.num_available:
            if not idle:
                return False
            self.forget(idle.pop(0))
        table.append(count)
        return True

    def _guess(self, work: list[_Work]) -> list[TokenIds]:
        """One step over all new tokens, then one for each further guess."""
        launched: list[LaunchedStep] = []
        drawing = [i for i, each in enumerate(work) if each.most > 0]
        launched.append(self._runner.launch(_first_step(work, drawing)))
        members = [drawing]
        while drawing:
            before, step = drawing, len(members)
            drawing = [i for i in before if work[i].most > step]
            if drawing:
                plan = _next_step([work[i] for i in drawing], step, _places(drawing, before))
                launched.append(self._runner.launch(plan))
                members.append(drawing)
        guesses: list[list[int]] = [[] for _ in work]
        for drew, ran in zip(members, launched, strict=True):
            for i, token_id in zip(drew, ran.result().token_ids, strict=True):
                guesses[i].append(token_id)
        for each, guess in zip(work, guesses, strict=True):
            each.pages.num_known = each.start + len(each.token_ids)
            each.pages.guessed = np.array(guess[:-1], dtype=np.int32)
        return [np.array(guess, dtype=np.int32) for guess in guesses]


def _first_step(work: list[_Work], drawing: list[int]) -> StepPlan:
    counts = np.array([len(each.token_ids) for each in work], dtype=np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    return StepPlan(
        token_ids=np.concatenate([each.token_ids for each in work]),
        starts=np.array([each.start for each in work], dtype=np.int32),
        counts=counts,
        tables=_tables(work),
        samples=[SampleRow(GREEDY, seed=0, position=0) for _ in drawing],
        sample_rows=ends[drawing] - 1,
    )


def _next_step(work: list[_Work], step: int, fed_from: Ints) -> StepPlan:
    """One more token for each, which only the device knows."""
    count = len(work)
    starts = [each.start + len(each.token_ids) + step - 1 for each in work]
    return StepPlan(
        token_ids=np.zeros(count, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        counts=np.ones(count, dtype=np.int32),
        tables=_tables(work),
        samples=[SampleRow(GREEDY, seed=0, position=0) for _ in work],
        sample_rows=np.arange(count, dtype=np.int32),
        fed_rows=np.arange(count, dtype=np.int32),
        fed_from=fed_from,
    )


def _places(some: list[int], among: list[int]) -> Ints:
    return np.searchsorted(among, some).astype(np.int32)


def _tables(work: list[_Work]) -> tuple[GroupTables]:
    return (GroupTables.of([each.pages.table.ids for each in work]),)
