"""The half beside vLLM's scheduler: which requests load what, and which blocks are saved when.

a request is new, or resumed     ask the workers; None to vLLM while a far tier is asked
blocks were allocated for it     load into them, with the next step's orders
each step that computes it       save the blocks that are full by its end
it ends                          vLLM keeps its blocks until its saves are over
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.connectors.vllm.lookup import LookupClient
from quire.connectors.vllm.orders import NO_BLOCK, LoadOrder, Orders, Prompt, SaveOrder, Tables
from quire.kv.hit_rule import Window
from quire.kv.kept_windows import is_kept


@dataclass
class Tracked:
    """A request that vLLM has told of."""

    request: Any  # vLLM's own: its tokens grow
    prompt: Prompt | None  # None where its blocks have no name
    tables: Tables = field(default_factory=list)
    asked_from: int | None = None  # the first block that the workers were asked for
    found: int | None = None  # blocks from there on; None while that is not known
    num_named: int = 0  # blocks whose names the workers know
    num_saved: int | None = None  # blocks that need no more saving; None before its first step
    is_loading: bool = False
    has_saves: bool = False


class SchedulerHalf:
    def __init__(
        self,
        workers: Sequence[LookupClient],
        block_size: int,
        prompt_of: Callable[[Any], Prompt | None],
        windows: Sequence[Window] = (None,),
    ) -> None:
        self._workers = workers
        self._block_size = block_size
        self._prompt_of = prompt_of
        self._windows = windows
        self._tracked: dict[str, Tracked] = {}
        self._next = Orders()

    # --- look-ups -------------------------------------------------------------------------------

    def num_found_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens behind those computed that all workers' tiers have; None: ask again later."""
        tracked = self._track(request)
        if tracked.prompt is None or request.skip_reading_prefix_cache:
            return 0
        first = num_computed_tokens // self._block_size
        # The last token is computed in any case: its logits are wanted.
        last = (request.num_tokens - 1) // self._block_size
        if last <= first:
            self._drop(tracked)
            return 0
        if tracked.asked_from != first:
            tracked.found, tracked.asked_from = None, first
            if tracked.num_saved is not None:  # workers name blocks anew, and so many
                tracked.num_saved = min(tracked.num_saved, last)
            self._ask(tracked, self._question(tracked, first), self._tokens(request, 0, last))
            tracked.num_named = last
        elif tracked.found is None:
            self._ask(tracked, {"request": request.request_id})
        return None if tracked.found is None else tracked.found * self._block_size

    def _question(self, tracked: Tracked, first: int) -> dict[str, Any]:
        assert tracked.prompt is not None
        return {
            "request": tracked.request.request_id,
            "salt": tracked.prompt.salt,
            "adapter": tracked.prompt.adapter,
            "first": first,
        }

    def _ask(self, tracked: Tracked, question: dict[str, Any], tokens: bytes = b"") -> None:
        answers = [worker.ask(question, tokens) for worker in self._workers]
        known = [answer or {"ready": True, "blocks": 0} for answer in answers]
        if all(answer["ready"] for answer in known):
            tracked.found = min(answer["blocks"] for answer in known)

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_found_tokens: int
    ) -> None:
        """vLLM has blocks for a request, and takes so many tokens of what was found."""
        tracked = self._track(request)
        if tracked.asked_from is None:
            return
        if not num_found_tokens:
            self._drop(tracked)
            return
        first = tracked.asked_from
        end = first + num_found_tokens // self._block_size
        parts = [list(table[first:end]) for table in tables]
        self._next.loads.append(LoadOrder(request.request_id, first, parts))
        tracked.asked_from, tracked.is_loading = None, True

    def _drop(self, tracked: Tracked) -> None:
        if tracked.asked_from is not None:
            tracked.asked_from = tracked.found = None
            for worker in self._workers:
                worker.ask({"drop": tracked.request.request_id})

    # --- steps ----------------------------------------------------------------------------------

    def plan_step(self, step: Any) -> Orders:
        """The orders that go with vLLM's plan of a step."""
        orders, self._next = self._next, Orders()
        orders.preempted += sorted(step.preempted_req_ids or ())
        for new in step.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
            self._save(orders, step, new.req_id, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            tables = cached.new_block_ids[at]
            if request in cached.resumed_req_ids:
                self._begin(request, tables or [[] for _ in self._windows])
            elif tables is not None and request in self._tracked:
                for table, new_blocks in zip(self._tracked[request].tables, tables, strict=True):
                    table += new_blocks
            self._save(orders, step, request, cached.num_computed_tokens[at])
        return orders

    def _begin(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        tracked = self._tracked.get(request)
        if tracked is not None:
            tracked.tables = [list(table) for table in tables]
            tracked.is_loading = False

    def _save(self, orders: Orders, step: Any, request: str, num_computed_tokens: int) -> None:
        """Of blocks that are full when the step is over, those whose tokens are all known: a step
        may compute guesses behind them."""
        tracked = self._tracked.get(request)
        if tracked is None or tracked.prompt is None:
            return
        if tracked.num_saved is None:  # what was cached has been saved by who computed it
            tracked.num_saved = num_computed_tokens // self._block_size
        computed = num_computed_tokens + step.num_scheduled_tokens[request]
        first = tracked.num_saved
        end = min(computed, tracked.request.num_tokens) // self._block_size
        if end <= first:
            return
        named = min(first, tracked.num_named)
        tokens = self._tokens(tracked.request, named, end)
        tables = [self._kept(tracked, group, first, end) for group in range(len(self._windows))]
        orders.saves.append(SaveOrder(request, tracked.prompt, first, named, tokens, tables))
        tracked.num_named = max(end, tracked.num_named)
        tracked.num_saved, tracked.has_saves = end, True

    def _kept(self, tracked: Tracked, group: int, first: int, end: int) -> list[int]:
        """A group's blocks; of a window only those that a later prompt may ask for."""
        blocks, window = tracked.tables[group][first:end], self._windows[group]
        if window is None:
            return blocks
        size, prompt_len = self._block_size, tracked.request.num_prompt_tokens
        return [
            block if is_kept(place, window, size, prompt_len) else NO_BLOCK
            for place, block in enumerate(blocks, first)
        ]

    def ended(self, request: Any) -> bool:
        """Whether vLLM is to keep the request's blocks until its saves are reported."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.is_loading:  # vLLM keeps the blocks until the load is reported
            self._next.withdrawn.append(request.request_id)
            return False
        (self._next.held if tracked.has_saves else self._next.ended).append(request.request_id)
        return tracked.has_saves

    def received(self, requests: Sequence[str]) -> None:
        """Their loads are over."""
        for request in requests:
            if request in self._tracked:
                self._tracked[request].is_loading = False

    # --- parts ----------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, self._prompt_of(request))
            self._tracked[request.request_id] = tracked
        return tracked

    def _tokens(self, request: Any, first: int, end: int) -> bytes:
        """Of blocks, as they are hashed."""
        size = self._block_size
        return np.array(request.all_token_ids[first * size : end * size], dtype="<i4").tobytes()
