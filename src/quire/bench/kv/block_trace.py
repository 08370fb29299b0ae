"""Which blocks each request of a trace asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise

from quire.bench.request_trace import Name, block_names, read_records
from quire.errors import ConfigError

ROOT = -1
MOST_BLOCKS = (1 << 31) - 1  # numbers take four bytes each


class Trace:
    """Requests as chains of numbered blocks, four bytes for each block of each request.

    A block's number stands for its name and all that stands before it, so that the requests are
    chains of one tree even where a file gives one name to several places.
    """

    def __init__(self) -> None:
        self.blocks = array("i")  # of all requests, one behind the other
        self.num_distinct = 0
        self._ends = array("q", [0])  # where each request begins, and the last one ends
        self._numbers: dict[Name, int] = {}  # of the first place with this name
        self._parents = array("i")
        self._further: dict[tuple[int, Name], int] = {}  # of other places with the same name

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in pairwise(self._ends):
            yield self.blocks[start:end].tolist()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def add(self, names: list[Name]) -> None:
        parent = ROOT
        for name in names:
            parent = self._number(name, parent)
            self.blocks.append(parent)
        self._ends.append(len(self.blocks))

    def _number(self, name: Name, parent: int) -> int:
        """Names nearly always have one place; the dictionary of pairs would take twice the room."""
        number = self._numbers.setdefault(name, self.num_distinct)
        if number != self.num_distinct:
            if self._parents[number] == parent:
                return number
            number = self._further.setdefault((parent, name), self.num_distinct)
        if number == self.num_distinct:
            self.num_distinct += 1
            self._parents.append(parent)
        return number


def read_trace(path: str) -> Trace:
    trace = Trace()
    for where, record in read_records(path):
        trace.add(block_names(record, where))
        if trace.num_distinct > MOST_BLOCKS:
            raise ConfigError(f"{where} is past {MOST_BLOCKS:,} blocks; cut the trace into parts.")
    if not trace.num_blocks:
        raise ConfigError(f"--trace {path} has no blocks; give a file with requests.")
    return trace
