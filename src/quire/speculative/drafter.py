"""What the engine asks of a drafter, which guesses a sequence's next tokens.

A drafter gives one guess, not a distribution: it is right or wrong. The model computes all guesses
in one step and draws a token behind each, with the very noise it would draw with otherwise; a guess
is accepted if it is the token drawn. That is rejection sampling against a certain guess: accepted
with the model's own probability, and else a token from what is left. So the answer is, token for
token, the one without any guess, whatever the sampling settings are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quire.kv.grouped_table import Table
from quire.kv.index import TokenIds

NO_TOKENS = np.empty(0, dtype=np.int32)


class Outlook(NamedTuple):
    """What a drafter can say of a sequence before it is asked for guesses."""

    is_ready: bool  # it would have a guess now
    right: int = 0  # since it was last asked: guesses it would have made that came true …
    wrong: int = 0  # … and that did not


class Wanted(NamedTuple):
    """Guesses to make: for whom, behind which tokens, and how many at most.

    All tokens but the last have their slots in `table`.
    """

    name: Hashable
    token_ids: TokenIds
    most: int
    table: Table


class Drafter(Protocol):
    """Sequences have names, of which it may remember what it likes until it is told to forget."""

    def look(self, name: Hashable, token_ids: TokenIds) -> Outlook:
        """The sequence has come so far. Cheap: it is asked before every step."""

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        """Guesses for each, none where there is no good one."""

    def forget(self, name: Hashable) -> None:
        """The sequence has ended."""
