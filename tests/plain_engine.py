"""An engine that is slow and obvious: one request, one sample, one token after another.

Nothing is cached, batched, shared or guessed: every token is drawn from the logits of its whole
context, which the model is asked for anew. It says whether rounding could have decided otherwise
(`is_sure`): then two right engines may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from plain_beams import plain_beams
from plain_sampler import on_edge, reference_logits, reference_probabilities

from quire.beam_params import BeamSearchParams
from quire.params import SamplingParams
from quire.runner.sampling.noise import sample_seed, uniform
from quire.runner.sampling.sample_row import SampleRow

CLOSE = 3e-6  # of the whole probability: float32 may see it on the other side
NUDGE = 1e-5  # of a beam's log-probabilities

Logits = Callable[[Sequence[int]], npt.NDArray[np.float64]]
Entry = dict[int, tuple[float, int]]  # by token id: its log-probability and its rank


@dataclass
class PlainSample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    logprobs: list[Entry] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    score: float | None = None


@dataclass
class PlainAnswer:
    samples: list[PlainSample]
    prompt_logprobs: list[Entry | None] | None = None
    is_sure: bool = True


class PlainEngine:
    """`spelling` is the text of each token, `special` the ids that are no text by default.

    `new_matcher(form)` starts a grammar anew.
    """

    def __init__(
        self,
        logits_behind: Logits,
        spelling: Sequence[str],
        special: set[int],
        eos: set[int],
        room: int,
        new_matcher: Callable[[Any], Any],
    ) -> None:
        self.logits_behind = logits_behind
        self.spelling, self.special, self.eos, self.room = spelling, special, eos, room
        self.new_matcher = new_matcher
        self._is_sure = True

    def answer(
        self, prompt: list[int], params: SamplingParams | BeamSearchParams, seed: int
    ) -> PlainAnswer:
        self._is_sure = True
        if isinstance(params, BeamSearchParams):
            return self._search(prompt, params)
        drawn = [self._sample(prompt, params, sample_seed(seed, i)) for i in range(_drawn(params))]
        if len(drawn) > params.n:
            drawn.sort(key=lambda sample: -sample.cumulative_logprob)
            sums = sorted(sample.cumulative_logprob for sample in drawn)
            self._doubt(any(0 < b - a < NUDGE for a, b in pairwise(sums)))
        judged = None
        if (k := params.prompt_logprobs) is not None:
            places = range(1, len(prompt))
            judged = [None, *(self._entry(prompt[:at], prompt[at], k) for at in places)]
        return PlainAnswer(drawn[: params.n], judged, self._is_sure)

    def _doubt(self, is_close: bool) -> None:
        self._is_sure = self._is_sure and not is_close

    def _sample(self, prompt: list[int], params: SamplingParams, seed: int) -> PlainSample:
        most = self.room - len(prompt)
        most = most if params.max_tokens is None else min(params.max_tokens, most)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        matcher = self.new_matcher(params.structured) if params.structured else None
        sample = PlainSample(finish_reason="length")
        for position in range(most):
            context = prompt + sample.token_ids
            token = self._draw(context, len(prompt), params, seed, stops, matcher)
            if params.logprobs is not None or _drawn(params) > params.n:
                sample.logprobs.append(self._entry(context, token, params.logprobs or 0))
                sample.cumulative_logprob += sample.logprobs[-1][token][0]
            sample.token_ids.append(token)
            if token in stops and position >= params.min_tokens:
                sample.finish_reason = "stop"
                break
            before = len(sample.text)
            sample.text += self._text(token, params)
            cut = (
                _stop_in(sample.text, before, params) if position + 1 >= params.min_tokens else None
            )
            if cut is not None:
                sample.text, sample.finish_reason = sample.text[:cut], "stop"
                break
            if matcher is not None:
                assert matcher.consume_token(token)
                if matcher.is_stopped():
                    sample.finish_reason = "stop"
                    break
        return sample

    def _text(self, token: int, params: SamplingParams) -> str:
        skipped = params.skip_special_tokens and token in self.special
        return "" if skipped else self.spelling[token]

    def _draw(
        self,
        context: list[int],
        prompt_len: int,
        params: SamplingParams,
        seed: int,
        stops: set[int],
        matcher: Any,
    ) -> int:
        ids = np.array(context, dtype=np.int32)
        position = len(context) - prompt_len
        is_short = position < params.min_tokens
        row = SampleRow(params, seed, position, ids[:prompt_len], ids[prompt_len:])
        if is_short and matcher is None:
            row.banned = tuple(stops)
        logits = reference_logits(self.logits_behind(context).tolist(), row)
        if matcher is not None:
            allowed = self._allowed(matcher, params, stops, is_short)
            logits = [x if i in allowed else -math.inf for i, x in enumerate(logits)]
        if params.is_greedy:
            best, second = sorted(logits, reverse=True)[:2]
            self._doubt(0 < best - second < 1e-5)
            return logits.index(best)
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._doubt(is_filtered and on_edge(logits, params, CLOSE))
        sums = list(accumulate(reference_probabilities(logits, params)))
        noise = float(uniform([seed], [position])[0])
        self._doubt(any(abs(each - noise) < CLOSE for each in sums[:-1]))
        return next((i for i, each in enumerate(sums) if each > noise), len(sums) - 1)

    def _allowed(
        self, matcher: Any, params: SamplingParams, stops: set[int], is_short: bool
    ) -> set[int]:
        """What the form allows; where it may end is the request's to say, if the form lets it."""
        bits = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = set(np.flatnonzero(bits[: len(self.spelling)]).tolist())
        if matcher.is_accepting() and not is_short:
            allowed |= set(params.stop_token_ids)
        unwanted = (self.eos if params.ignore_eos else set()) | (stops if is_short else set())
        return allowed - unwanted or allowed

    def _entry(self, context: list[int], token: int, k: int) -> Entry:
        """The token by the model's own distribution, and the `k` likeliest."""
        logits = self.logits_behind(context)
        logprobs = (logits - np.log(np.exp(logits).sum())).tolist()
        ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
        entry = {token: (logprobs[token], ranked.index(token) + 1)}
        for rank, best in enumerate(ranked[:k], start=1):
            entry.setdefault(best, (logprobs[best], rank))
        return entry

    def _search(self, prompt: list[int], params: BeamSearchParams) -> PlainAnswer:
        def logprobs_behind(context: list[int], nudge: float = 0.0) -> Any:
            logits = self.logits_behind(context)
            nudges = nudge * np.cos(np.arange(len(logits)) + len(context))
            return logits - np.log(np.exp(logits).sum()) + nudges

        found, *nudged = (
            plain_beams(
                prompt, params, lambda c, by=by: logprobs_behind(c, by), self.room, self.eos
            )
            for by in (0.0, NUDGE, -NUDGE)
        )
        tokens = [[beam for beam, _ in beams] for beams in (found, *nudged)]
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        samples = []
        for beam, score in found:
            ended = beam[-1] in stops
            text = "".join(self._text(t, params.sampling) for t in (beam[:-1] if ended else beam))
            total = score * len(beam) ** params.length_penalty
            reason = "stop" if ended else "length"
            samples.append(PlainSample(beam, text, reason, [], total, score))
        return PlainAnswer(samples, None, tokens.count(tokens[0]) == len(tokens))


def _drawn(params: SamplingParams) -> int:
    return params.best_of or params.n


def _stop_in(text: str, before: int, params: SamplingParams) -> int | None:
    """Where the text is cut: the first stop string to end in what came last, the longest of it."""
    for end in range(before + 1, len(text) + 1):
        found = [stop for stop in params.stop if text[:end].endswith(stop)]
        if found:
            return end if params.include_stop_str_in_output else end - max(map(len, found))
    return None
