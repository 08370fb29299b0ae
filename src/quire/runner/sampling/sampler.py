"""Drawing tokens: the whole batch at once, on the device where the logits are.

    rows that only want the likeliest token        argmax
    rows that change their logits (a copy)         bias, penalties, bans, masks, then as above or
                                                   below
    rows with a temperature (a copy)               weights, min-p, top-k, top-p, then a draw

Rows do not look at each other, and each brings its own seed: the same row draws the same token
alone or among any neighbours. A draw inverts the cumulative distribution with one uniform number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.errors import QuireError
from quire.params import SamplingParams
from quire.runner.sampling.batch_params import BatchParams
from quire.runner.sampling.filters import Filters, keep_likeliest_
from quire.runner.sampling.logprobs import Logprobs, read_scores, score
from quire.runner.sampling.masks import TokenMasks, mask_
from quire.runner.sampling.noise import uniform
from quire.runner.sampling.penalties import adjust_
from quire.runner.sampling.sample_row import SampleRow
from quire.runner.transfer import BY_COPY_ENGINES, Fetch, HostLink, told_by_kernels

__all__ = ["BadLogits", "Logprobs", "SampleRow", "Sampled", "Sampler"]

STRIDE = 128  # a draw first finds this many tokens, then the one among them


class BadLogits(QuireError):
    """The model's output for `rows` is not a distribution: NaN, infinite, or all tokens banned."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model gave no usable logits for rows {list(rows)} of the step "
            "(NaN, infinite, or every token ruled out)"
        )
        self.rows = list(rows)


class Sampled:
    """Drawn tokens, on the device and on their way to the host.

    Every id is valid, also in a row that went wrong.
    """

    def __init__(
        self,
        token_ids: Tensor,  # int64 [rows]
        scored: Sequence[tuple[int, int]],  # rows that want logprobs, and of how many best tokens
        fetch: Fetch,  # of what `in_one_piece` makes
    ) -> None:
        self.token_ids = token_ids
        self.scored = scored
        self._fetch = fetch

    def to_host(self) -> tuple[list[int], list[Logprobs | None]]:
        """Ids and logprobs, once they are here; BadLogits names the rows that have none."""
        host = self._fetch.wait()
        count = len(self.token_ids)
        token_ids = host[:count].astype(np.int64).tolist()
        sound = np.isfinite(host[count : 2 * count])
        if not sound.all():
            raise BadLogits(np.flatnonzero(~sound).tolist())
        logprobs: list[Logprobs | None] = [None] * count
        if self.scored:
            rows, ks = zip(*self.scored, strict=True)
            table = host[2 * count :].reshape(len(rows), -1)
            read = read_scores(table, [token_ids[row] for row in rows], ks)
            for row, entry in zip(rows, read, strict=True):
                logprobs[row] = entry
        return token_ids, logprobs


def in_one_piece(token_ids: Tensor, peaks: Tensor, scores: Tensor | None) -> Tensor:
    """What the host is told, as numbers that hold every id exactly: vocabularies end far below 2²⁴.

    A peak is finite where the row's logits were a distribution."""
    parts = [token_ids, peaks.float()]
    if scores is not None:
        parts.append(scores.flatten())
    return torch.cat(parts)


class Sampler:
    """Draws the tokens of a runner's steps, and remembers the parameters of the last batch."""

    def __init__(self, link: HostLink = BY_COPY_ENGINES) -> None:
        self.link = link
        self._last = BatchParams([], 0)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        drawn: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Draw one token from each row of `logits` `[rows, vocabulary]`, which stay as they are.

        `drawn` are the tokens of the step before, where a row's penalties need one of them.
        """
        scored: list[tuple[int, int]] = []
        engine_asks = any(row.want_logprob or row.num_best for row in rows)
        if engine_asks or self._batch_params(rows, logits.shape[1]).logprobs:
            scored = [
                (i, row.num_best or row.params.logprobs or 0)
                for i, row in enumerate(rows)
                if row.wants_logprobs
            ]
        if logits.is_cuda:
            token_ids, peaks, told = self.draw_on_gpu(logits, rows, drawn, masks)
            if not scored:
                return Sampled(token_ids, scored, told)
        else:
            logits = logits.float()
            token_ids, peaks = self.draw_on_cpu(logits, rows, drawn, masks)
        ranked = any(not rows[i].num_best for i, _ in scored)  # of a beam only the best are wanted
        scores = self._scores(logits, token_ids, scored, ranked)
        return Sampled(token_ids, scored, self.link.fetch(in_one_piece(token_ids, peaks, scores)))

    def draw_on_gpu(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        drawn: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor, Fetch]:
        """Token and peak logit of each row, by kernels, which tell the host both, as `in_one_piece`
        does; the host waits for nothing."""
        from quire.kernels.triton.sampling.sample import draw

        batch = self._batch_params(rows, logits.shape[1])
        adjusts = batch.changed_logits or any(row.banned for row in rows)
        if adjusts or masks is not None:
            logits = logits.to(torch.float32, copy=True)
        if adjusts:
            adjust_(logits, rows, drawn, self.link)
        if masks is not None:
            mask_(logits, masks, self.link)
        settings = batch.settings_on(logits.device, self.link)
        noise = settings  # which nothing reads, if all are greedy
        if not batch.all_greedy:
            found = uniform([row.seed for row in rows], [row.position for row in rows])
            noise = torch.from_numpy(found)
            noise = noise.pin_memory() if logits.is_cuda else noise
        told = torch.empty(2 * len(rows), dtype=torch.float32, pin_memory=logits.is_cuda)
        token_ids, peaks = draw(logits, settings, noise, batch.filters, told)
        return token_ids, peaks, told_by_kernels(told, noise)

    def draw_on_cpu(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        drawn: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Token and peak logit of each row."""
        masked = set(masks.rows.tolist()) if masks is not None else ()
        busy = [
            i
            for i, row in enumerate(rows)
            if row.changes_logits or not row.params.is_greedy or i in masked
        ]
        if busy and len(busy) == len(rows):
            token_ids, peaks = self._draw(logits.clone(), rows, drawn, masks)
        else:
            token_ids, peaks = _likeliest(logits)
            if busy:
                index = self.link.to_device(busy, logits.device)
                if masks is not None:
                    masks = masks.among(busy)
                some = self._draw(logits[index], [rows[i] for i in busy], drawn, masks)
                token_ids[index], peaks[index] = some
        return token_ids, peaks

    def _batch_params(self, rows: Sequence[SampleRow], vocab_size: int) -> BatchParams:
        last, params = self._last, [row.params for row in rows]
        if last.vocab_size != vocab_size or last.params != params:
            last = self._last = BatchParams(params, vocab_size)
        last.params = params  # lists of the same objects are found equal faster next time
        return last

    def _scores(
        self, logits: Tensor, token_ids: Tensor, scored: list[tuple[int, int]], ranked: bool
    ) -> Tensor | None:
        if not scored:
            return None
        widest = max(k for _, k in scored)
        if len(scored) == len(token_ids):
            return score(logits.float(), token_ids, widest, ranked)
        index = self.link.to_device([row for row, _ in scored], logits.device)
        return score(logits[index].float(), token_ids[index], widest, ranked)

    def _draw(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        drawn: Tensor | None,
        masks: TokenMasks | None,
    ) -> tuple[Tensor, Tensor]:
        """Token and peak logit of each row; `logits` are overwritten.

        The peak tells whether the row is sound: argmax finds a NaN or an infinity wherever one is.
        """
        adjust_(logits, rows, drawn, self.link)
        if masks is not None:
            mask_(logits, masks, self.link)
        token_ids = _argmax(logits)
        peaks = logits.gather(1, token_ids[:, None])
        random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if len(random) == len(rows):
            token_ids = self._draw_at_random(logits, peaks, rows)
        elif random:
            index = self.link.to_device(random, logits.device)
            random_rows = [rows[i] for i in random]
            token_ids[index] = self._draw_at_random(logits[index], peaks[index], random_rows)
        return token_ids, peaks.squeeze(1)

    def _draw_at_random(self, logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        noise = uniform([row.seed for row in rows], [row.position for row in rows])
        weights = filtered_weights_(logits, peaks, [row.params for row in rows], self.link)
        return invert(weights, self.link.to_device(noise, logits.device))


def filtered_weights_(
    logits: Tensor,
    peaks: Tensor,
    params: Sequence[SamplingParams],
    link: HostLink = BY_COPY_ENGINES,
) -> Tensor:
    """What each row draws from, not normalised: the likeliest token weighs 1. In place."""
    temperatures = link.to_device(
        np.array([each.temperature for each in params], dtype=np.float32), logits.device
    )
    # Peaks come off before the division, so that nothing can overflow.
    weights = logits.sub_(peaks).div_(temperatures[:, None]).exp_()
    vocab_size = logits.shape[1]
    filters = Filters(
        min_p=np.array([each.min_p for each in params]),
        top_k=np.array([_top_k(each, vocab_size) for each in params], dtype=np.int64),
        top_p=np.array([each.top_p for each in params]),
    )
    keep_likeliest_(weights, filters, link)
    return weights


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The token at which the running sum of weights passes `noise` (in (0, 1)) of the total.

    In two strides, so that no long running sum is made: the stretch of tokens, then the token.
    """
    vocab_size = weights.shape[1]
    if gap := -vocab_size % STRIDE:
        weights = pad(weights, (0, gap))
    stretches = weights.view(len(weights), -1, STRIDE)
    stretch, noise = _find(stretches.sum(-1), noise)
    chosen = stretches[torch.arange(len(weights), device=weights.device), stretch]
    token, _ = _find(chosen, noise)
    return (stretch * STRIDE + token).clamp_(max=vocab_size - 1)


def _find(masses: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The item in which `noise` of the total mass falls, and how far into it, from 0 to 1.

    The first sum above the target belongs to an item with some mass of its own. The target is
    kept below the total, so that there always is one.
    """
    sums = masses.double().cumsum(-1)
    total = sums[:, -1]
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    item = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, item).squeeze(1).double()
    passed = sums.gather(1, item).squeeze(1) - mass
    return item.squeeze(1), ((target - passed) / mass).clamp_(0.0, 1.0)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    token_ids = _argmax(logits)
    return token_ids, logits.gather(1, token_ids[:, None]).squeeze(1)


def _argmax(logits: Tensor) -> Tensor:
    """The first of the largest logits in each row."""
    return torch.from_numpy(logits.numpy().argmax(-1))  # torch's own is ten times slower
