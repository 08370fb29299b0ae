"""What one sequence has left of its budget for thinking, and what it must draw where that is none.

    <think> ── at most so many tokens ── </think> ── words and calls

Where the budget is used up, the tokens that close a thought are the only ones that may be drawn,
one after the other. A model that thinks in several messages (gpt-oss) has one budget for all of
them, and may not begin another when it is used up. Which of its messages are thoughts is told by
the text of their headers: the same word can be spelled in many tokens. One that is begun all the
same, in a spelling that is not barred, has to be closed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from quire.thinking import (
    FEW_BEFORE,
    FINAL,
    LONGEST_HEADER,
    ThoughtMarkers,
    channel_of,
    is_thought,
)

if TYPE_CHECKING:
    from quire.kv.index import TokenIds


class ThoughtBudget:
    """Follows the output of one sequence, as far as it is known, and knows nothing of steps."""

    def __init__(
        self,
        markers: ThoughtMarkers,
        budget: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode` has tags in its text; without it the header of a thought is known by its ids."""
        self._markers = markers
        self._decode = decode if markers.between else None
        self._budget = budget
        self.invalidate()

    def invalidate(self) -> None:
        """Tokens may have been taken back: begin again the next time."""
        self.left = self._budget
        self.is_over = False  # no thought can come any more
        self._is_open = self._markers.is_open
        self._num_closing = 0  # tokens that close it, of those that have come
        self._header: tuple[int, ...] = ()  # those that have come of what opens or ends thoughts
        self._is_in_header = True  # the prompt has begun the first message
        self._num_followed = 0

    def follow(self, output_ids: TokenIds) -> None:
        """Go on to the end of the output."""
        if self.is_over:
            return
        for token_id in output_ids[self._num_followed :].tolist():
            self._take(token_id)

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: there are others."""
        is_used_up = self._is_open and self.left == 0
        return self._markers.closes[self._num_closing] if is_used_up else None

    @property
    def barred(self) -> int | None:
        """A token that may not come next: from there on, the header of a thought looks like one."""
        opens = self._markers.opens
        can_open = not (self._is_open or self.is_over or self.left)
        return opens[1] if can_open and len(opens) > 1 and self._header[-1:] == opens[:1] else None

    @property
    def num_free(self) -> int:
        """How many draws it leaves alone at least, whatever they are."""
        if self._is_open or self.left:
            return self.left
        return int(self.barred is None)  # the next one may begin a header

    def num_free_drafts(self, drafts: TokenIds) -> int:
        """How many of these may come next, so that it leaves alone all draws, that behind the last
        of them too."""
        ahead, num_draws = copy(self), 0
        for token_id in drafts.tolist():
            if ahead.num_free == 0:
                break
            num_draws += 1
            ahead._take(token_id)
        else:
            num_draws += ahead.num_free > 0
        return max(num_draws - 1, 0)

    def _take(self, token_id: int) -> None:
        if self.is_over:
            return
        if self._is_open:
            self._take_thought(token_id)
        if not self._is_open:
            self._take_other(token_id)
        self._num_followed += 1

    def _take_thought(self, token_id: int) -> None:
        opens, closes = self._markers.opens, self._markers.closes
        if token_id == closes[self._num_closing]:
            self._num_closing += 1
            if self.left or self._num_closing == len(closes):
                self._close()
        elif (len(opens) > 1 and token_id == opens[0]) or token_id in self._markers.between:
            self._close()  # the header of the next message
        else:  # … if only because a form of output has not let the thought be closed
            self._num_closing = 0
            self.left = max(self.left - 1, 0)

    def _close(self) -> None:
        self._is_open = False
        self._num_closing = 0
        self._is_in_header = False
        self.is_over = self._markers.comes_first

    def _take_other(self, token_id: int) -> None:
        if self._decode is not None:
            self._take_message(token_id, self._decode)
        else:
            self._take_mark(token_id)

    def _take_message(self, token_id: int, decode: Callable[[Sequence[int]], str]) -> None:
        if not self._is_in_header:
            if token_id in self._markers.between:
                self._is_in_header, self._header = True, (token_id,)
            return
        self._header = (*self._header, token_id)
        if token_id == self._markers.opens[-1]:
            header = decode(self._header)
            self._is_open, self.is_over = is_thought(header), channel_of(header) == FINAL
            self._end_header()
        elif len(self._header) > LONGEST_HEADER:
            self._end_header()

    def _end_header(self) -> None:
        self._is_in_header, self._header = False, ()

    def _take_mark(self, token_id: int) -> None:
        opens, ends = self._markers.opens, self._markers.ends
        longer = (*self._header, token_id)
        self._header = next(filter(self._begins_a_mark, (longer, (token_id,))), ())
        is_late = self._markers.comes_first and self._num_followed + 1 >= FEW_BEFORE
        if self._header == opens:
            self._header = ()
            self._is_open = True
        elif is_late or (ends and self._header == ends):
            self.is_over = True

    def _begins_a_mark(self, header: tuple[int, ...]) -> bool:
        length, markers = len(header), self._markers
        return header in (markers.opens[:length], markers.ends[:length])
