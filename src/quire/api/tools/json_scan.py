"""Where a JSON object or array ends, found as its text comes in."""

from __future__ import annotations

OUTSIDE = frozenset(' \t\r\n{}[]:,"+-.') | frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


class JsonScan:
    """Follows brackets and strings, no more: whether it is JSON is another's to find out."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_done = False  # the bracket that was opened first is closed
        self.is_broken = False  # there is a character that JSON has only in strings

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def is_inside_string(self) -> bool:
        return self._in_string

    def feed(self, text: str) -> int:
        """How many characters belong to the value; less than all where it ends or breaks."""
        for place, char in enumerate(text):
            if self._in_string:
                self._feed_string(char)
            elif char not in OUTSIDE:
                self.is_broken = True
                return place
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return place + 1
        return len(text)

    def _feed_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


def outer_keys(text: str) -> tuple[list[str], str]:
    """The keys of an object that may be cut off anywhere, and what there is of the next one."""
    keys: list[str] = []
    scan, is_key, start = JsonScan(), False, 0
    for place, char in enumerate(text):
        was_inside = scan.is_inside_string
        scan.feed(char)
        if scan.depth == 1 and not was_inside:
            if char in "{,":
                is_key = True
            elif char == '"' and is_key:
                start = place + 1
        if was_inside and not scan.is_inside_string and is_key and scan.depth == 1:
            keys.append(text[start:place])
            is_key = False
    return keys, text[start:] if is_key and scan.is_inside_string else ""
