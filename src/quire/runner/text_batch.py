"""The texts of one step, on the host; nothing here needs torch, which a server does without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Whole texts, laid end to end."""

    token_ids: Array  # int64 [tokens]
    lengths: Array  # int64 [texts]
    seconds: (
        Array  # int64 [texts]: where the second text of a pair begins; its end, where none does
    )

    @classmethod
    def of(
        cls, token_ids: Sequence[Sequence[int] | Array], seconds: Sequence[int | None] = ()
    ) -> TextBatch:
        """At least one text; no `seconds`: they are no pairs."""
        lengths = np.array([len(ids) for ids in token_ids], dtype=np.int64)
        whole = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in token_ids])
        if not any(second is not None for second in seconds):
            return cls(whole, lengths, lengths)
        pairs = zip(seconds, lengths, strict=True)
        places = [length if second is None else second for second, length in pairs]
        return cls(whole, lengths, np.array(places, dtype=np.int64))

    @classmethod
    def joined(cls, batches: Sequence[TextBatch]) -> TextBatch:
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([each.token_ids for each in batches]),
            np.concatenate([each.lengths for each in batches]),
            np.concatenate([each.seconds for each in batches]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens up to the end of each text."""
        return list(accumulate(self.lengths.tolist()))

    def part(self, texts: range) -> TextBatch:
        """Some of the texts, which are neighbours."""
        if len(texts) == len(self):
            return self
        places = slice(texts.start, texts.stop)
        tokens = slice(
            self.ends[texts.start] - int(self.lengths[texts.start]), self.ends[texts[-1]]
        )
        return TextBatch(self.token_ids[tokens], self.lengths[places], self.seconds[places])

    def in_order(self, order: Array) -> TextBatch:
        """The same texts, each at its place in `order`."""
        lengths = self.lengths[order]
        starts = np.cumsum(self.lengths) - self.lengths
        ahead = np.cumsum(lengths) - lengths
        rows = np.arange(self.num_tokens) + np.repeat(starts[order] - ahead, lengths)
        return TextBatch(self.token_ids[rows], lengths, self.seconds[order])
