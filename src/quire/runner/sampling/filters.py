"""min-p, top-k and top-p, as one number a row: the smallest weight that is kept.

A weight is a probability as a multiple of the likeliest token's: exp((logit - peak) / temperature),
so the best token weighs exactly 1. All three filters keep the heaviest tokens and differ only in
where they stop:

    min-p   weight >= min_p
    top-k   weight >= the k-th heaviest
    top-p   weight >= the one with which the running sum of what is left reaches p of its total

Tokens of equal weight stay or go together, so ties at the threshold are all kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.transfer import BY_COPY_ENGINES, HostLink

SHORT = 1024  # up to here picking the heaviest is cheaper than sorting all
NUCLEUS = 256  # on a CPU top-p looks among this many first: mostly they are enough

Floats = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Filters:
    """One value a row, on the host, which decides which rows need which filter."""

    min_p: Floats
    top_k: Index  # the vocabulary's size where off
    top_p: Floats  # 1 where off

    def of(self, rows: Mask, device: torch.device, link: HostLink) -> Tensor:
        """min_p, top_k and top_p of some rows, as columns: float64 `[3, rows, 1]`."""
        chosen = np.stack([self.min_p[rows], self.top_k[rows], self.top_p[rows]])
        return link.to_device(chosen[:, :, None], device)


def keep_likeliest_(weights: Tensor, filters: Filters, link: HostLink = BY_COPY_ENGINES) -> None:
    """Set to 0, in place, the weights `[rows, vocabulary]` that a row's filters leave out."""
    vocab_size = weights.shape[1]
    limited, nucleus = filters.top_k < vocab_size, filters.top_p < 1
    if not (limited | nucleus | (filters.min_p > 0)).any():
        return
    least = link.to_device(filters.min_p, weights.device).to(weights.dtype)
    short = limited & (filters.top_k <= SHORT)
    if short.any():
        _by_head_(least, weights, filters, short, int(filters.top_k[short].max()), link)
    rest = (limited | nucleus) & ~short
    if weights.device.type == "cpu" and vocab_size > NUCLEUS:
        rest = _by_nucleus_(least, weights, filters, rest, link)
    if rest.any():
        _by_head_(least, weights, filters, rest, vocab_size, link)
    # A mask of floats: multiplying floats by a mask of bools is six times slower on a CPU.
    weights.mul_(torch.ge(weights, least[:, None], out=torch.empty_like(weights)))


def _by_head_(
    least: Tensor, weights: Tensor, filters: Filters, rows: Mask, width: int, link: HostLink
) -> None:
    """Set `least` of `rows`, whose filters all end within their `width` heaviest weights."""
    index, weights = _pick(weights, rows, link)
    head = _heaviest(weights, width)
    least[index], _ = _threshold(head, filters.of(rows, head.device, link))


def _by_nucleus_(
    least: Tensor, weights: Tensor, filters: Filters, rest: Mask, link: HostLink
) -> Mask:
    """Set `least` of those rows whose top-p ends early; returns the rows that are left.

    Asks the device how it went, which costs nothing on a CPU; a GPU would have to be waited for.
    """
    rows = rest & (filters.top_k == weights.shape[1])
    if not rows.any():
        return rest
    index, weights = _pick(weights, rows, link)
    chosen = filters.of(rows, weights.device, link)
    counted = weights.masked_fill(weights < chosen[0], 0.0) if filters.min_p.any() else weights
    total = counted.sum(-1, keepdim=True, dtype=torch.float64)
    least[index], num_kept = _threshold(_heaviest(weights, NUCLEUS), chosen, total)
    found = np.zeros_like(rest)
    found[rows] = num_kept.numpy() < NUCLEUS
    return rest & ~found


def _pick(weights: Tensor, rows: Mask, link: HostLink) -> tuple[Tensor, Tensor]:
    index = link.to_device(np.flatnonzero(rows), weights.device)
    return index, weights if rows.all() else weights[index]


def _heaviest(weights: Tensor, width: int) -> Tensor:
    """The `width` largest weights of each row, in descending order."""
    if width < weights.shape[1]:
        return weights.topk(width).values
    if weights.device.type == "cpu":  # torch carries indices along, and is five times slower here
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)[:, ::-1].copy())
    return weights.sort(descending=True).values


def _threshold(head: Tensor, chosen: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The smallest weight each row keeps, and how many of its `head` that is.

    `head` are a row's heaviest weights in order. Top-p takes its share of `total`: the sum of
    what the other filters leave, where that is more than the head.
    """
    min_p, top_k, top_p = chosen
    place = torch.arange(head.shape[1], device=head.device)
    left = head.double().masked_fill_((place >= top_k) | (head < min_p.to(head.dtype)), 0.0)
    reached = left.cumsum(-1)
    if total is None:
        total = reached[:, -1:]
    enough = torch.where(top_p < 1, top_p * total, torch.inf)
    num_kept = ((left > 0) & (reached - left < enough)).sum(-1, keepdim=True)
    last = (num_kept - 1).clamp_(min=0)  # a row of NaN keeps none; its peak gives it away
    return head.gather(1, last).squeeze(1), num_kept.squeeze(1)
