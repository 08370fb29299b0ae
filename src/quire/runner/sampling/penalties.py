"""What is done to logits before anything is drawn: biases, penalties, bans.

All of it touches few entries, so it works on flat pairs (row, token id) of the whole batch:
read those logits, change them, write them back. Where a pair occurs twice, reading and writing
gives the same value twice; only the frequency penalty must add up, and accumulates. A token that
only the device knows yet, since the step that draws it is under way, joins the pairs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampling.sample_row import SampleRow
from quire.runner.transfer import BY_COPY_ENGINES, HostLink

Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, dtype=np.int64)


def adjust_(
    logits: Tensor,
    rows: Sequence[SampleRow],
    drawn: Tensor | None = None,
    link: HostLink = BY_COPY_ENGINES,
) -> None:
    """Apply what each row asks for to its logits `[rows, vocabulary]`, in place.

    `drawn` are the tokens of the step before, on the device, which `fed_from` counts.
    """
    _add_biases_(logits, rows, link)
    _penalise_repetition_(logits, rows, drawn, link)
    _penalise_presence_(logits, rows, drawn, link)
    _penalise_frequency_(logits, rows, drawn, link)
    _ban_(logits, rows, link)


def _add_biases_(logits: Tensor, rows: Sequence[SampleRow], link: HostLink) -> None:
    biases = [row.params.logit_bias or {} for row in rows]
    if pairs := _pairs(logits, [np.fromiter(bias, np.int64, len(bias)) for bias in biases], link):
        values = [value for bias in biases for value in bias.values()]
        logits[pairs] += link.to_device(np.array(values, dtype=np.float32), logits.device)


def _penalise_repetition_(
    logits: Tensor, rows: Sequence[SampleRow], drawn: Tensor | None, link: HostLink
) -> None:
    penalties = [row.params.repetition_penalty for row in rows]
    seen = [
        np.concatenate([_known(row.prompt_ids), _known(row.output_ids)])
        if penalty != 1
        else _NO_IDS
        for row, penalty in zip(rows, penalties, strict=True)
    ]
    fed = _fed(rows, [penalty != 1 for penalty in penalties], drawn, link)
    if pairs := _pairs(logits, seen, link, fed):
        penalty = _each(logits, penalties, pairs, link)
        found = logits[pairs]
        logits[pairs] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_presence_(
    logits: Tensor, rows: Sequence[SampleRow], drawn: Tensor | None, link: HostLink
) -> None:
    penalties = [row.params.presence_penalty for row in rows]
    fed = _fed(rows, [penalty != 0 for penalty in penalties], drawn, link)
    if pairs := _pairs(logits, _generated(rows, penalties), link, fed):
        logits[pairs] = logits[pairs] - _each(logits, penalties, pairs, link)


def _penalise_frequency_(
    logits: Tensor, rows: Sequence[SampleRow], drawn: Tensor | None, link: HostLink
) -> None:
    penalties = [row.params.frequency_penalty for row in rows]
    fed = _fed(rows, [penalty != 0 for penalty in penalties], drawn, link)
    if pairs := _pairs(logits, _generated(rows, penalties), link, fed):
        logits.index_put_(pairs, -_each(logits, penalties, pairs, link), accumulate=True)


def _ban_(logits: Tensor, rows: Sequence[SampleRow], link: HostLink) -> None:
    if pairs := _pairs(logits, [np.array(row.banned, dtype=np.int64) for row in rows], link):
        logits[pairs] = -torch.inf


def _generated(rows: Sequence[SampleRow], penalties: Sequence[float]) -> list[Ids]:
    return [
        _known(row.output_ids) if penalty else _NO_IDS
        for row, penalty in zip(rows, penalties, strict=True)
    ]


def _known(ids: npt.NDArray[np.int32] | None) -> Ids:
    return _NO_IDS if ids is None else ids.astype(np.int64)


def _fed(
    rows: Sequence[SampleRow], wanted: Sequence[bool], drawn: Tensor | None, link: HostLink
) -> tuple[Tensor, Tensor] | None:
    """Rows whose newest token is on the device alone, and that token."""
    fed = [
        (i, row.fed_from)
        for i, (row, want) in enumerate(zip(rows, wanted, strict=True))
        if want and row.fed_from >= 0
    ]
    if not fed:
        return None
    assert drawn is not None
    row, place = link.to_device(np.array(fed, dtype=np.int64).T, drawn.device)
    return row, drawn[place]


def _pairs(
    logits: Tensor, ids: Sequence[Ids], link: HostLink, fed: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Indices of every row's ids, laid end to end; None where there are none at all."""
    counts = [len(of_row) for of_row in ids]
    if not any(counts):
        return fed
    both = np.stack([np.repeat(np.arange(len(ids)), counts), np.concatenate(ids)])
    row, token_id = link.to_device(both, logits.device)
    if fed is not None:
        row, token_id = torch.cat((row, fed[0])), torch.cat((token_id, fed[1]))
    return row, token_id


def _each(
    logits: Tensor, per_row: Sequence[float], pairs: tuple[Tensor, Tensor], link: HostLink
) -> Tensor:
    return link.to_device(np.array(per_row, dtype=np.float32), logits.device)[pairs[0]]
