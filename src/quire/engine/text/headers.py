"""Which tokens of an answer in channels are the words of a header, which its reader never sees."""

from __future__ import annotations

from quire.thinking import ThoughtMarkers

MOST_TOKENS = 64  # of a header: what is longer may be words that lack their tag, and are shown


class Headers:
    """Asked of every token in turn. The tags around a header are not its words.

    An answer may begin within a message, so that the words before the first tag are no header.
    """

    def __init__(self, markers: ThoughtMarkers) -> None:
        self._between = frozenset(markers.between)
        self._message = markers.opens[-1]
        self._most_left = 0  # words of a header that may still come

    def hide(self, token_id: int) -> bool:
        if token_id in self._between:
            self._most_left = MOST_TOKENS
            return False
        if token_id == self._message:
            self._most_left = 0
        is_hidden = self._most_left > 0
        self._most_left -= is_hidden
        return is_hidden
