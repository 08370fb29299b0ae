"""Which adapters the pass under way has: what the runner sets and matrices read."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch


class ActiveAdapters:
    """Those of the rows of a pass; `batch` is None if no row has any."""

    batch: AdapterBatch | None = None

    def __init__(self) -> None:
        self._shrunk: tuple[Tensor, Tensor] | None = None

    def put_shrunk(self, x: Tensor, hidden: Tensor) -> None:
        """`hidden` is what `a` of the matrix that reads `x` next makes of it."""
        self._shrunk = x, hidden

    def take_shrunk(self, x: Tensor) -> Tensor | None:
        """What `a` makes of `x`, if that is known."""
        shrunk, self._shrunk = self._shrunk, None
        return shrunk[1] if shrunk is not None and shrunk[0] is x else None
