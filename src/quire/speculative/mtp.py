"""Guesses by the model's own MTP layer (`models/deepseek_mtp.py`).

The layer runs behind each step of the model (`runner/draft_layer.py`), and its KV lies in the
sequence's own blocks: what is shared, kept in lower tiers or computed again is so with it. A first
guess needs only its hidden state behind the newest token. For each further one the layer runs over
the guess before, in slots that the next step will take anyway, and that are given back until then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kv.index import TokenIds
from quire.runner.draft_layer import DraftLayer
from quire.runner.plan import GroupTables, StepPlan
from quire.speculative.drafter import NO_TOKENS, Outlook, Wanted


@dataclass(frozen=True)
class _State:
    """The layer's hidden state behind a sequence's newest token: a row of what a step has left."""

    states: Tensor
    row: int
    num_tokens: int


class MTPDrafter:
    def __init__(self, layer: DraftLayer) -> None:
        self._layer = layer
        self._states: dict[Hashable, _State] = {}

    def keep(self, name: Hashable, states: Tensor, row: int, num_tokens: int) -> None:
        """A step has drawn the sequence's newest token, and it has so many now."""
        self._states[name] = _State(states, row, num_tokens)

    def look(self, name: Hashable, token_ids: TokenIds) -> Outlook:
        return Outlook(is_ready=True)

    def forget(self, name: Hashable) -> None:
        self._states.pop(name, None)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        """A sequence that was computed some other way since has no guess before its next token."""
        places = [place for place, each in enumerate(wanted) if self._is_known(each)]
        guesses = [NO_TOKENS] * len(wanted)
        if places:
            found = self._guess([wanted[place] for place in places])
            for place, guess in zip(places, found, strict=True):
                guesses[place] = guess
        return guesses

    def _is_known(self, wanted: Wanted) -> bool:
        state = self._states.get(wanted.name)
        return state is not None and state.num_tokens == len(wanted.token_ids)

    def _guess(self, wanted: list[Wanted]) -> list[TokenIds]:
        states = [self._states[each.name] for each in wanted]
        hidden = torch.stack([state.states[state.row] for state in states])
        guesses = [self._layer.guess(hidden)]
        further = [_make_room(each) for each in wanted]
        try:
            for number in range(1, 1 + max(further)):
                going = [i for i, count in enumerate(further) if count >= number]
                rows = torch.tensor(going, device=hidden.device)
                inputs = self._layer.inputs(_next_step([wanted[i] for i in going], number))
                hidden[rows] = self._layer.run(inputs, guesses[-1][rows], hidden[rows])
                guesses.append(self._layer.guess(hidden))
        finally:
            for each in wanted:
                each.table.truncate(len(each.token_ids) - 1)  # as it was
        found = torch.stack(guesses).T.tolist()
        return [
            np.array(row[: 1 + count], dtype=np.int32)
            for row, count in zip(found, further, strict=True)
        ]


def _make_room(wanted: Wanted) -> int:
    """Take slots for all guesses but the first; for how many there were some.

    A last block that others hold, too, is copied when the next step writes to it, and not before.
    """
    count, (table,) = wanted.most - 1, wanted.table.groups  # latents are one group
    if table.must_copy_last() or table.blocks_needed(count) > table.allocator.num_available:
        return 0
    table.append(count)
    return count


def _next_step(wanted: list[Wanted], number: int) -> StepPlan:
    """The layer's row for guess `number`, counted from 0, of each: behind the newest token, whose
    own row the model computes in its next step."""
    count = len(wanted)
    return StepPlan(
        token_ids=np.zeros(count, dtype=np.int32),  # which the model would embed
        starts=np.array([len(w.token_ids) - 2 + number for w in wanted], dtype=np.int32),
        counts=np.ones(count, dtype=np.int32),
        tables=(GroupTables.of([each.table.ids for each in wanted]),),
        samples=[],
        sample_rows=np.empty(0, dtype=np.int32),
    )
