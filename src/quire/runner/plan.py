"""A step as plain data: a plan is arrays and values, so that it can be sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.runner.sampling.sampler import Logprobs, SampleRow

Ints = npt.NDArray[np.int32]


def _none() -> Ints:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class PromptLogprobRows:
    """Rows of the step whose logits say how likely the prompt's own next tokens were."""

    first_row: int
    next_ids: Ints
    k: int


@dataclass(frozen=True)
class GroupTables:
    """The blocks of a step's sequences in one KV group.

    A sequence that has given back its first blocks, which the group's window has passed, has a
    table that begins behind them: column 0 of sequence `s` is its block number `firsts[s]`.
    """

    block_tables: Ints  # [sequences, width], padded with zeros
    firsts: Ints | None = None  # [sequences]; None: every table begins with block 0

    @classmethod
    def of(cls, ids: Sequence[Ints], firsts: Sequence[int] = ()) -> GroupTables:
        """From the block ids of each sequence."""
        lengths = np.array([len(blocks) for blocks in ids])
        places = np.arange(lengths.max())
        padded = np.zeros((len(ids), len(places)), dtype=np.int32)
        padded[places < lengths[:, None]] = np.concatenate(ids)
        return cls(padded, np.array(firsts, dtype=np.int32) if any(firsts) else None)


@dataclass(frozen=True)
class StepPlan:
    """The next tokens of several sequences, laid end to end.

    Sequence `s` computes `counts[s]` tokens behind the `starts[s]` it already has in the cache.
    """

    token_ids: Ints  # [tokens]
    starts: Ints  # [sequences]
    counts: Ints  # [sequences]
    tables: tuple[GroupTables, ...]  # one for each KV group of the model
    samples: Sequence[SampleRow]  # tokens to draw …
    sample_rows: Ints  # … and the row of the step each is drawn behind; a row may repeat
    prompt_logprobs: Sequence[PromptLogprobRows] = ()
    is_masked: bool = False  # nothing is drawn before the masks of its rows are known
    # Rows whose token only the device knows yet (0 above), and the place of each among the tokens
    # that the last step drew.
    fed_rows: Ints = field(default_factory=_none)
    fed_from: Ints = field(default_factory=_none)
    # Rows at the end of a chunk behind which nothing is drawn, and the known token behind each.
    next_rows: Ints = field(default_factory=_none)
    next_ids: Ints = field(default_factory=_none)
    # [sequences]: the slot of each one's adapter, -1 without; empty where no sequence has one.
    adapter_slots: Ints = field(default_factory=_none)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token."""
        return len(self.token_ids) == len(self.counts)


def empty_plan(num_groups: int = 1) -> StepPlan:
    """A step without any sequence."""
    tables = (GroupTables(np.empty((0, 0), dtype=np.int32)),) * num_groups
    return StepPlan(_none(), _none(), _none(), tables, [], _none())


@dataclass(frozen=True)
class AdapterInfo:
    """What a runner says of an adapter that it has read into host memory."""

    fingerprint: str  # of its contents
    rank: int
    num_bytes: int


@dataclass(frozen=True)
class StepResult:
    """What came out of a step, in the order of its plan."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs]]
    draft_states: Tensor | None = None  # of an MTP layer, behind each token; on the device
