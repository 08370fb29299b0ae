"""A step as it was planned: the tokens of each sequence, what is drawn, and what is copied before.

`Draw` is the interface of what a step draws behind a chunk; its classes are in `engine/draws`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.engine.sequence import Request, Sequence
from quire.kv.index import Node, TokenIds
from quire.kv.table import BlockCopy
from quire.runner.sampling.sampler import Logprobs, SampleRow

NOTHING = range(0)
NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)

Drawn = tuple[int, Logprobs | None]


class Draw:
    """What a step draws behind a chunk, and what becomes of it."""

    count: int = 0  # tokens drawn
    drafts: TokenIds = NO_TOKENS  # guesses, which are the last tokens of the chunk
    num_drafts: int = 0
    is_awaited: bool = False  # no step is planned before the host has read it
    holds_sequence: bool = False  # its sequence goes no further before the host has read it

    def sample_rows(self, chunk: Chunk, fed_from: int) -> list[SampleRow]:
        """How each of its tokens is drawn.

        `fed_from`: the place of the chunk's last token among the draws of the step before, or -1.
        """
        return []

    def positions(self, end: int) -> Iterable[int]:
        """The row of the step behind which each token is drawn; the chunk's rows end at `end`."""
        return [end - 1] * self.count

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        """The chunk is computed, and these tokens were drawn behind it."""
        commit.computed(chunk)


class CommitActions(Protocol):
    """What a draw may do with what was drawn (`engine/commit.py`)."""

    num_generated_tokens: int

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is there: let others find its full blocks."""

    def append(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> None:
        """A sequence has its next token, with which it may end."""

    def new_sample(self, request: Request, sample: int) -> Sequence:
        """A further sequence of a request, with nothing but the prompt."""

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` has the parent's tokens so far and shares their blocks."""

    def finish(self, sequence: Sequence, reason: str) -> None: ...

    def drafts_tried(self, chunk: Chunk, num_accepted: int) -> None: ...


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of one sequence, as they stood when the step was planned."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool  # it brings KV up to the tokens: the next token can be drawn
    draw: Draw
    prompt_scored: range = NOTHING  # positions whose logits score the prompt's next token
    num_published: int = 0  # blocks that others can find from this step on
    admitted: bool = False  # it was waiting before this step

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_masked(self) -> bool:
        """Whether a grammar, or the end of a thought, may rule out some of what it could draw.

        Drafts are such that a thought has no say in any draw behind them.
        """
        sequence = self.sequence
        if sequence.grammar is not None:
            return True
        if (thought := sequence.open_thought) is None:
            return False
        return thought.num_free <= self.end - self.draw.num_drafts - sequence.tokens.count

    @property
    def is_fed(self) -> bool:
        """Whether its last token is one that the step before it draws."""
        is_ahead = self.start + self.count > self.sequence.tokens.count
        return is_ahead and not self.draw.num_drafts


@dataclass
class Schedule:
    """One step: its chunks in order, and the copies to make before it."""

    number: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    is_awaited: bool = False  # its results decide what the next step can be
    published: set[Node] = field(default_factory=set)  # of blocks that it fills, after the copies
