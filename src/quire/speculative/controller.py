"""How many tokens to guess ahead, from how often guesses came true and what they cost.

A step with guesses takes longer, for everybody in it. With B tokens drawn in a plain step, one more
token to compute costs as much as `price` tokens drawn: its time, divided by the time a step takes
for each token it draws. A guess pays if it is right with a better chance than that. Both are
measured: chances for each sequence, times for all of them together.
"""

from __future__ import annotations

_MEMORY = 0.9  # what a chance remembers of all before, with each guess
_HOPE = (1.0, 1.0)  # right and wrong guesses, before there are any
LEAST_GAIN = 1.05  # below, a step without guesses is better: it overlaps with the next
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # tokens
_WEIGHT = 0.1  # of a new time among the old ones
_FIRST_PRICE = 0.1
_OUTLIER = 2.0  # times as long as it may take: something else happened
PLAIN_EVERY = 64  # steps


class Controller:
    """Of one sequence."""

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

    def length(self, most: int, price: float) -> int:
        """The number of guesses that gives most tokens for the time; 0 while that loses."""
        chance, best, gain = self.chance, 0, LEAST_GAIN
        tokens = power = 1.0
        for length in range(1, most + 1):
            power *= chance
            tokens += power
            if tokens / (1 + length * price) > gain:
                best, gain = length, tokens / (1 + length * price)
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
        self._per_guess: dict[int, float] = {}

    def observe(self, sequences: int, guesses: int, seconds: float) -> None:
        order = sequences.bit_length()
        plain = self._plain.get(order)
        if guesses == 0:
            self._plain[order] = _blend(plain, min(seconds, _OUTLIER * (plain or seconds)))
        elif plain is not None:
            # A guess takes as long as any token at most; and steps of one order differ in size, so
            # one with guesses may even be shorter than the usual one without.
            most = _OUTLIER * plain * (1 + guesses / sequences)
            extra = max(0.0, min(seconds, most) - plain) / guesses
            self._per_guess[order] = _blend(self._per_guess.get(order), extra)

    def price(self, sequences: int) -> float:
        """Of one guess, in tokens drawn by a plain step of so many sequences."""
        order = sequences.bit_length()
        if order not in self._per_guess:
            return _FIRST_PRICE
        return self._per_guess[order] * sequences / self._plain[order]

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without guesses, if there was one."""
        return self._plain.get(sequences.bit_length())


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
