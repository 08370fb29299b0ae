"""The rule of beam search, as `transformers` has it: which beams go on, which have ended.

    each step:  all continuations of all beams, by the sum of their log-probabilities
                ├─ those that end, among the first `width`     ─►  hypotheses, the `width` best by
                │                                                  sum / length ** length_penalty
                └─ the first `width` that do not end           ─►  the beams of the next step

A search is over when no beam goes on, or when the hypotheses are `width` and `early_stopping` says
that waiting for better ones is not worth it. Nothing here knows of tokens or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from quire.beam_params import BeamSearchParams


class Candidate(NamedTuple):
    """A beam with one more token."""

    beam: int  # its place among the beams of the step
    token_id: int
    logprob: float  # of all its tokens


@dataclass(frozen=True, slots=True)
class Ended:
    """A candidate that is a hypothesis now."""

    candidate: Candidate
    score: float
    finish_reason: str


class BeamSearch:
    """The state of one search. `max_tokens` and `num_stop_ids` are those of its request."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, num_stop_ids: int) -> None:
        self.params = params
        self.max_tokens = max_tokens
        # Of each beam, so many that `width` of them surely do not end by their token; twice the
        # width where a stop string may end some.
        self.num_candidates = params.beam_width + max(num_stop_ids, params.beam_width)
        self.length = 0  # tokens that each beam has generated
        self.scores: list[float] = []  # of the hypotheses, best first
        self.is_over = False

    def advance(
        self, candidates: Sequence[Candidate], ends: Callable[[Candidate], bool]
    ) -> tuple[list[Candidate], list[Ended]]:
        """The beams of the next step, best first, and those that have ended.

        `ends` is asked of as few candidates as can be, the best first.
        """
        width = self.params.beam_width
        self.length += 1
        is_last = self.length >= self.max_tokens
        going: list[Candidate] = []
        ended: list[Ended] = []
        ranked = sorted(candidates, key=attrgetter("logprob"), reverse=True)
        for place, candidate in enumerate(ranked):
            if place >= width and (is_last or len(going) == width):
                break
            reason = "stop" if ends(candidate) else "length" if is_last else None
            if reason is None:
                going.append(candidate)
            elif place < width:
                ended.append(Ended(candidate, self._score(candidate.logprob), reason))
        del going[width:]
        self.scores += [each.score for each in ended]
        self.scores.sort(reverse=True)
        del self.scores[width:]
        self.is_over = not going or self._is_enough(going[0])
        return going, ended

    def _score(self, logprob: float, length: int | None = None) -> float:
        return float(logprob / (length or self.length) ** self.params.length_penalty)

    def _is_enough(self, best: Candidate) -> bool:
        """Whether `best`, which goes on, need not be waited for."""
        params = self.params
        if len(self.scores) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        at_most = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_tokens if at_most else self.length
        return self._score(best.logprob, length) <= self.scores[-1]
