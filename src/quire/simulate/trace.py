"""A trace as requests whose token ids are made when they arrive: equal names make equal blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.bench.request_trace import BLOCK_TOKENS, Name, block_names, number, read_records
from quire.errors import ConfigError
from quire.simulate.runner import FIRST_DRAWN

OFFSETS_S = 60.0  # copies of a trace begin at moments of its first minute

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    blocks: Numbers  # one for each 512 tokens; each token of a block is the block's number
    num_in: int
    num_out: int

    def token_ids(self) -> Numbers:
        return np.repeat(self.blocks, BLOCK_TOKENS)[: self.num_in]


class Trace:
    """Requests in the order of their times, the first at 0."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.num_names = 0
        self._numbers: dict[Name, int] = {}

    def __len__(self) -> int:
        return len(self.arrivals)

    def add(self, at: float, names: list[Name], num_in: int, num_out: int) -> None:
        """Blocks that have no name are like no others."""
        num_blocks = -(-num_in // BLOCK_TOKENS)
        numbers = [self._number(name) for name in names[:num_blocks]]
        while len(numbers) < num_blocks:
            numbers.append(self._next())
        blocks = np.array(numbers, dtype=np.int32)
        self.arrivals.append(Arrival(at, blocks, num_in, num_out))

    def _number(self, name: Name) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next()
        return number

    def _next(self) -> int:
        self.num_names += 1
        return self.num_names - 1

    def replay(self, copies: int = 1, speed: float = 1.0, seed: int = 0) -> Iterator[Arrival]:
        """`copies` of it together, which share no block, `speed` times as fast."""
        if copies * self.num_names > FIRST_DRAWN:
            raise ConfigError(
                f"{copies} copies of {self.num_names:,} blocks are too many; give fewer --copies."
            )
        r = random.Random(seed)
        offsets = [0.0, *(r.uniform(0, OFFSETS_S) for _ in range(copies - 1))]
        times = np.array([each.at for each in self.arrivals])
        moments = (np.array(offsets)[:, None] + times).ravel() / speed
        for place in np.argsort(moments, kind="stable").tolist():
            copy, which = divmod(place, len(self.arrivals))
            each = self.arrivals[which]
            blocks = each.blocks + np.int32(copy * self.num_names)
            yield Arrival(float(moments[place]), blocks, each.num_in, each.num_out)


def read_trace(path: str, most: int | None = None) -> Trace:
    """The first `most` requests of a file."""
    trace = Trace()
    for where, record in read_records(path):
        if most is not None and len(trace) >= most:
            break
        names = block_names(record, where)
        num_in = max(1, int(number(record, "input_length", where)))
        num_out = max(1, int(number(record, "output_length", where)))
        trace.add(number(record, "timestamp", where) / 1000, names, num_in, num_out)
    if not len(trace):
        raise ConfigError(f"--trace {path} has no requests; give another file.")
    trace.arrivals.sort(key=lambda each: each.at)
    first = trace.arrivals[0].at
    trace.arrivals = [
        Arrival(each.at - first, each.blocks, each.num_in, each.num_out) for each in trace.arrivals
    ]
    return trace


def random_trace(num_requests: int, rate: float, seed: int) -> Trace:
    """Short prompts at random moments, `rate` a second; every other begins with a common block."""
    r, at, trace = random.Random(seed), 0.0, Trace()
    for _ in range(num_requests):
        names: list[Name] = []
        num_in = r.randint(32, 400)
        if r.random() < 0.5:
            names, num_in = [r.choice("abc")], BLOCK_TOKENS + r.randint(16, 200)
        trace.add(at, names, num_in, r.randint(8, 48))
        at += r.expovariate(rate)
    return trace
