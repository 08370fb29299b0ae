"""How much it is worth to keep a block: learned from which blocks came back, and how soon.

Blocks are told apart by a class (how often they were used, say) and by their age, the number of
requests since their last use. A class at an age is a cell. Each cell counts the blocks that
reached it and those of them that were asked for while in it; their ratio is the chance to come
back in that cell. Chained along the ages of a class, the chances say for every age a:

    hits(a, b)   the share of the blocks of age a that come back before they are b old
    time(a, b)   how long such a block is kept on average, until then or until b at most
    value(a)     the best hits(a, b) / time(a, b) over all b: hits for a place and a unit of time

This is the index of Gittins: with places for the most valuable blocks, no rule that knows the same
cells hits more. Where reuse fades with age it orders as LRU does, where a class never comes back
its value is near zero, and where it comes back after a while only, waiting blocks gain value.

Yesterday's counts may mislead today, and counts of a moment are noise. So several memories count
side by side, each with its own speed of forgetting, and each is trusted by how well it foretold
what happened lately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

OLDEST_AGE = 1 << 18  # requests; older ones are all alike
AGES_PER_DOUBLING = 2

FIRST_GUESS = 0.5  # chance to come back in the first cell, before anything is known
FADING = 0.5  # … and in each cell behind it, as a part of that before: newer is better at first
WEIGHT_OF_GUESS = 0.5  # in requests: blocks of one request come back together and count as one
TRUST_KEPT = 0.9  # of what the memories earned, at each step of learning
TRUST_SHARED = 0.02  # so that one that was wrong for long is heard soon when it is right


class ReuseModel:
    """Counts what happens in each cell and turns it into the cells' values and their order.

    A cell's number is `class × num_ages + age`. The policy adds to `reached` and `returned`.
    """

    def __init__(self, num_classes: int, half_lives: Sequence[float]) -> None:
        """How long each memory takes to forget half, in the unit of what `learn` calls elapsed."""
        self.ages = _age_limits()
        self.num_ages = len(self.ages)
        self.num_cells = num_classes * self.num_ages
        self._shape = (num_classes, self.num_ages)
        self._widths = np.diff([*self.ages, 2 * self.ages[-1]]).astype(np.float64)
        self._half_lives = np.asarray(half_lives, dtype=np.float64)
        self._reached = np.zeros((len(half_lives), *self._shape))
        self._returned = np.zeros_like(self._reached)
        self._trust = np.zeros(len(half_lives))  # logarithms
        self._start_counting()
        self._weigh(request_length=1.0)

    def learn(self, elapsed: float, request_length: float) -> None:
        """Take in what was counted since the last time, `elapsed` ago, and value all anew."""
        reached = np.reshape(self.reached, self._shape)
        returned = np.reshape(self.returned, self._shape)
        self._judge_memories(reached, returned, request_length)
        kept = 0.5 ** (elapsed / self._half_lives)[:, None, None]
        self._reached = kept * self._reached + reached
        self._returned = kept * self._returned + returned
        self._start_counting()
        self._weigh(request_length)

    def _start_counting(self) -> None:
        self.reached = [0.0] * self.num_cells
        self.returned = [0.0] * self.num_cells

    def _judge_memories(self, reached: Floats, returned: Floats, request_length: float) -> None:
        """Trust grows by the likelihood that a memory gave to what was counted."""
        stayed_away = np.maximum(reached - returned, 0)
        likelihood = returned * np.log(self._chances) + stayed_away * np.log1p(-self._chances)
        self._trust = TRUST_KEPT * self._trust + likelihood.sum(axis=(1, 2)) / request_length
        self._trust -= self._trust.max()

    def _weigh(self, request_length: float) -> None:
        self._chances = self._chances_by_memory(WEIGHT_OF_GUESS * request_length)
        weights = np.exp(self._trust)
        weights = (1 - TRUST_SHARED) * weights / weights.sum() + TRUST_SHARED / len(weights)
        value = _values(np.tensordot(weights, self._chances, axes=1), self._widths).ravel()
        order = np.argsort(value, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        # Lists: the policy reads them cell by cell.
        self.value: list[float] = value.tolist()
        self.order: list[int] = order.tolist()  # cells, the least valuable first
        self.rank: list[int] = rank.tolist()  # where a cell stands in that order

    def _chances_by_memory(self, guess_weight: float) -> Floats:
        """Seldom seen cells lean on all classes of that age, seldom seen ages on those before."""
        reached, returned = self._reached.sum(axis=1), self._returned.sum(axis=1)
        of_all = np.empty_like(reached)
        guess = np.full(len(reached), FIRST_GUESS)
        for age in range(self.num_ages):
            guess = (returned[:, age] + guess_weight * guess) / (reached[:, age] + guess_weight)
            of_all[:, age] = guess
            guess = FADING * guess
        returned, reached = self._returned + guess_weight * of_all[:, None], self._reached
        chances: Floats = np.clip(returned / (reached + guess_weight), 1e-6, 1 - 1e-6)
        return chances


def _age_limits() -> list[int]:
    """Where each age begins: 0, 2, 3, 4, 6, 8, 11, 16, … requests."""
    steps = range(AGES_PER_DOUBLING, AGES_PER_DOUBLING * (OLDEST_AGE.bit_length() - 1) + 1)
    return [0, *(round(2 ** (step / AGES_PER_DOUBLING)) for step in steps)]


def _values(chances: Floats, widths: Floats) -> Floats:
    """The value of every class at every age, from the chances to come back in each cell."""
    left = np.cumprod(1 - chances, axis=1)  # share of a class that did not come back so far
    at_start = np.hstack([np.ones((len(chances), 1)), left[:, :-1]])
    hits = _sums_from_here(at_start * chances)
    time = _sums_from_here(at_start * widths * (1 - chances / 2))  # a block comes back halfway
    more_hits = hits[:, :-1, None] - hits[:, None, :]  # class, from age, to age
    more_time = time[:, :-1, None] - time[:, None, :]
    rates = np.divide(more_hits, more_time, out=np.zeros_like(more_hits), where=more_time > 0)
    best: Floats = rates.max(axis=2)
    return best


def _sums_from_here(values: Floats) -> Floats:
    """Sums to the end, down to zero: differences of these keep their digits where few are left."""
    sums = np.cumsum(values[:, ::-1], axis=1)[:, ::-1]
    return np.hstack([sums, np.zeros((len(values), 1))])
