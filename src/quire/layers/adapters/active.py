"""Which adapters the pass under way has: what the runner sets and matrices read."""

from __future__ import annotations

from quire.kernels.adapter_slots import AdapterBatch


class ActiveAdapters:
    """Those of the rows of a pass; `batch` is None if no row has any."""

    batch: AdapterBatch | None = None
