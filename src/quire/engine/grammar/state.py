"""Where one sequence stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.source import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.kv.index import TokenIds


class GrammarState:
    """Follows the output of one sequence, as far as it is known.

    It knows nothing of steps: one that is taken back has added no output, and a sequence that is
    preempted keeps its own.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.matcher: LLMatcher = grammar.new_matcher()
        self._grammar: Grammar | None = grammar
        self.error: str | None = None  # why it cannot go on
        self._num_followed: int | None = 0

    def follow(self, output_ids: TokenIds) -> None:
        """Go on to the end of the output."""
        if self._num_followed == len(output_ids):
            return
        if self._num_followed is None:
            self.matcher.reset()
            self._num_followed = 0
        new = output_ids[self._num_followed :].tolist()
        self._num_followed = None  # should this be interrupted
        if not self.matcher.consume_tokens(new):
            self.note_error()
        self._num_followed = len(output_ids)
        assert self._grammar is not None
        self._grammar.num_followed += len(new)

    def num_valid(self, token_ids: TokenIds) -> int:
        """How many of these could come next, one after the other."""
        count: int = self.matcher.validate_tokens(token_ids.tolist())
        return count

    def invalidate(self) -> None:
        """It may have been interrupted: begin again the next time."""
        self._num_followed = None

    @property
    def is_complete(self) -> bool:
        """Whether the text has the form, and could not go on without losing it."""
        return self.matcher.is_stopped()

    def release(self) -> None:
        """The sequence has ended: the grammar's memory is not its to hold any more."""
        if self._grammar is not None:
            self._grammar = None
            del self.matcher

    def note_error(self) -> None:
        if self.error is None:
            if self._grammar is not None:
                self._grammar.is_worn_out = True
            reason = one_line(self.matcher.get_error())
            self.error = (
                f"The output cannot be held to its form any further ({reason}); use a simpler one."
            )
