"""Finding stop strings in text that arrives in pieces.

All stop strings are searched at once, one step a character, by an Aho-Corasick automaton: a
tree of the strings in which every node also knows its fallback, the longest proper suffix of its
text that is a node too. The node reached is the longest end of the text so far that begins some
stop string, which is just what must not be shown yet.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque


class StopAutomaton:
    """The tree of some stop strings; it never changes, so that many searches share it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: dict[tuple[int, str], int] = {}
        self.depth = array("l", [0])  # characters on the way from the root
        self.fallback = array("l", [0])
        self.match_length = array("l", [0])  # of the longest stop string that ends here, or 0
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.children.get((node, char))
            if child is None:
                child = self.children[node, char] = len(self.depth)
                self.depth.append(self.depth[node] + 1)
                self.fallback.append(0)
                self.match_length.append(0)
            node = child
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        """Set fallbacks level by level: a node's lies below one of its parent's fallbacks."""
        below: dict[int, list[tuple[str, int]]] = {}
        for (node, char), child in self.children.items():
            below.setdefault(node, []).append((char, child))
        queue = deque(child for _, child in below.get(0, ()))
        while queue:
            node = queue.popleft()
            self.match_length[node] = (
                self.match_length[node] or self.match_length[self.fallback[node]]
            )
            for char, child in below.get(node, ()):
                self.fallback[child] = self.follow(self.fallback[node], char)
                queue.append(child)

    def follow(self, node: int, char: str) -> int:
        """The node of the text behind `node` with one more character."""
        while True:
            child = self.children.get((node, char))
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.fallback[node]


@functools.lru_cache(maxsize=8)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Samples of one request, and requests that stop alike, share one automaton."""
    return StopAutomaton(stops)


class StopSearch:
    """Lets text through as far as it can be no part of a stop string.

    Of several matches the one that ends first wins; of those that end together, the longest.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._automaton = stop_automaton(stops)
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self.found: str | None = None  # the stop string that was met

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that may be shown now that `text` has come; none behind a stop string.

        Matches that end in this text do not count unless `may_stop`.
        """
        automaton, node = self._automaton, self._node
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            node = automaton.follow(node, char)
            if may_stop and automaton.match_length[node]:
                start = end - automaton.match_length[node]
                self.found = buffer[start:end]
                self._held = ""
                return buffer[: end if self._include_stop else start]
        self._node = node
        safe = len(buffer) - automaton.depth[node]
        self._held = buffer[safe:]
        return buffer[:safe]

    def pass_by(self, text: str) -> str:
        """What may be shown with this text, in which no stop string begins or ends."""
        self._node = 0
        return self.flush() + text

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held
