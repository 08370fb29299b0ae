"""How a layer turns the products of q and K into weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scoring:
    """A score is `scale * (q · k)`, bent to below `softcap`; then what a token sees is weighed.

    With a `softcap` the score s becomes `softcap * tanh(s / softcap)`, as in Gemma 2. With a
    `window` a token sees that many positions at most, itself included. `sinks` are learned scores,
    one for each query head, of a key whose value is zero, as in gpt-oss: neither scaled nor capped.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]

    @property
    def is_plain(self) -> bool:
        """Whether nothing but scale and mask stands between the products and the softmax."""
        return self.softcap is None and self.sinks is None
