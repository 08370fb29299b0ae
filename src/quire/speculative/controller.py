"""How many tokens to guess ahead, from how often guesses came true and what they cost.

A step with guesses takes longer, for everybody in it: by something as soon as there is one at all
(other kernels, no overlap with the next step), and by more with each. What a sequence's guesses add
is counted in tokens drawn: their time, divided by the time a plain step takes for each token it
draws. They pay if more of them come true than that. Both are measured: chances for each sequence,
times for all of them together.
"""

from __future__ import annotations

from typing import NamedTuple

_MEMORY = 0.9  # what a chance remembers of all before, with each guess
_HOPE = (1.0, 1.0)  # right and wrong guesses, before there are any
LEAST_GAIN = 1.05  # below, a step without guesses is better: it overlaps with the next
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # tokens
_WEIGHT = 0.1  # of a new time among the old ones
_OUTLIER = 2.0  # times as long as it may take: something else happened
PLAIN_EVERY = 64  # steps


class Price(NamedTuple):
    """What guesses cost one sequence, in tokens drawn by a plain step."""

    any: float  # for guessing at all
    each: float


FIRST_PRICE = Price(0.2, 0.05)


class Controller:
    """How many tokens to guess for one sequence."""

    def __init__(self) -> None:
        self._right, self._wrong = _HOPE
        self._pause = 0  # tokens to go until it is tried again
        self._next_pause = _FIRST_PAUSE

    @property
    def chance(self) -> float:
        """That a guess is right if those before it were."""
        return self._right / (self._right + self._wrong)

    def note(self, right: int, wrong: int) -> None:
        for _ in range(right):
            self._right, self._wrong = self._right * _MEMORY + 1, self._wrong * _MEMORY
        for _ in range(wrong):
            self._right, self._wrong = self._right * _MEMORY, self._wrong * _MEMORY + 1

    def passed(self, tokens: int) -> None:
        """So many tokens came."""
        self._pause -= tokens

    def length(self, most: int, price: Price) -> int:
        """The number of guesses that gives most tokens for the time; 0 while that loses."""
        chance, best, gain = self.chance, 0, LEAST_GAIN
        tokens = power = 1.0
        for length in range(1, most + 1):
            power *= chance
            tokens += power
            cost = 1 + price.any + length * price.each
            if tokens / cost > gain:
                best, gain = length, tokens / cost
        if best:
            self._next_pause = _FIRST_PAUSE
            return best
        if self._pause > 0 or most == 0:
            return 0
        self._pause = self._next_pause  # once more, to see whether it still loses
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return min(most, 2)


class StepTimes:
    """How long steps take that only decode, with guesses and without."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds, by the order of how many sequences
        self._extra: dict[int, _Line] = {}  # seconds more, by how many guesses there were

    def observe(self, sequences: int, guesses: int, seconds: float) -> None:
        order = sequences.bit_length()
        plain = self._plain.get(order)
        if guesses == 0:
            seconds = min(seconds, _OUTLIER * (plain or seconds))
            self._plain[order] = seconds if plain is None else _blend(plain, seconds)
        elif plain is not None:
            # A guess takes as long as any token at most; and steps of one order differ in size, so
            # one with guesses may even be shorter than the usual one without.
            most = _OUTLIER * plain * (1 + guesses / sequences)
            extra = max(0.0, min(seconds, most) - plain)
            self._extra.setdefault(order, _Line()).add(guesses, extra)

    def price(self, sequences: int, guessing: int) -> Price:
        """So many of the sequences are `guessing`, and share what it costs at all."""
        order = sequences.bit_length()
        if order not in self._extra:
            return FIRST_PRICE
        share = sequences / self._plain[order]
        line = self._extra[order]
        return Price(line.start * share / max(1, guessing), line.slope * share)

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without guesses, if there was one."""
        return self._plain.get(sequences.bit_length())


class _Line:
    """Seconds as a straight line over the number of guesses, fitted to the latest steps.

    While that number hardly changes the slope is not known, and taken to be small: then more are
    tried, and it becomes known.
    """

    def __init__(self) -> None:
        self._guesses = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0
        self._count = 0

    def add(self, guesses: int, seconds: float) -> None:
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        off, late = guesses - self._guesses, seconds - self._seconds
        self._guesses += weight * off
        self._seconds += weight * late
        self._variance = (1 - weight) * (self._variance + weight * off * off)
        self._covariance = (1 - weight) * (self._covariance + weight * off * late)

    @property
    def slope(self) -> float:
        """Never below nothing, and never more than if nothing else took time."""
        slope = self._covariance / (self._variance + 0.25)
        return min(max(slope, 0.0), self._seconds / self._guesses)

    @property
    def start(self) -> float:
        return self._seconds - self.slope * self._guesses


def _blend(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old)
