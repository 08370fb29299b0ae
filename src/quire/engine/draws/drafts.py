"""Tokens drawn behind guesses: one behind the last known token, and one behind each guess."""

from __future__ import annotations

import numpy as np

from quire.engine.draws.sample_row import sample_row
from quire.engine.schedule.chunk import Chunk, CommitActions, Draw, Drawn
from quire.engine.sequence import Status
from quire.kv.index import TokenIds
from quire.runner.sampling.sampler import SampleRow


class Drafts(Draw):
    """Guesses that were drawn become tokens, with the token drawn behind the last of them.

    From the first guess that was not drawn, the slots are given back; no key ever covers them.
    """

    is_awaited = True
    holds_sequence = True

    def __init__(self, drafts: TokenIds) -> None:
        self.drafts = drafts
        self.num_drafts = len(drafts)
        self.count = 1 + len(drafts)

    def sample_rows(self, chunk: Chunk, fed_from: int) -> list[SampleRow]:
        """Each is drawn as if the drafts in front of it were right."""
        sequence, known = chunk.sequence, chunk.end - self.num_drafts
        rows = [sample_row(sequence, known + i, sequence.seed) for i in range(self.count)]
        if sequence.params.needs_penalties:
            for i, row in enumerate(rows):
                row.output_ids = np.concatenate([sequence.output_ids, self.drafts[:i]])
        return rows

    def positions(self, end: int) -> range:
        return range(end - self.count, end)

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        sequence, tokens = chunk.sequence, chunk.sequence.tokens
        right = accepted(self.drafts, [token_id for token_id, _ in drawn])
        known = tokens.count
        tokens.extend(self.drafts[:right])  # their KV is there, and is made known with them
        assert sequence.table is not None
        sequence.table.truncate(tokens.count)
        sequence.num_computed = tokens.count
        commit.computed(chunk)
        tokens.truncate(known)
        commit.drafts_tried(chunk, right)
        for token_id, logprobs in drawn[: right + 1]:
            if sequence.status is not Status.FINISHED:
                commit.append(sequence, token_id, logprobs)


def accepted(drafts: TokenIds, drawn: list[int]) -> int:
    """How many drafts were drawn: up to the first that was not."""
    wrong = np.flatnonzero(drafts != np.array(drawn[: len(drafts)], dtype=drafts.dtype))
    return int(wrong[0]) if len(wrong) else len(drafts)
