"""One text, or pair of texts, and the vector that becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kv.index import TokenIds
from quire.pooling_params import PoolingParams

Vector = npt.NDArray[np.float32]


@dataclass(eq=False)
class PoolingRequest:
    id: str
    prompt_ids: TokenIds
    params: PoolingParams
    priority: int = 0
    name: str = ""  # what its caller calls it; several may have the same
    is_background: bool = False  # it waits behind all that are not, …
    turn: int = 0  # … and in this order among its like
    number: int = 0  # order of arrival
    result: Vector | None = None
    error: str | None = None
    is_at_fault: bool = False  # the error is the request's own, not the engine's
    is_begun: bool = False  # a step has taken it
    is_aborted: bool = False
    stages: list[tuple[str, float]] = field(default_factory=list)  # each from a moment on

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None or self.is_aborted


@dataclass
class PoolingOutput:
    """What a caller gets back."""

    request_id: str
    prompt_token_ids: list[int]
    data: Vector | None  # None where there is an error
    finished: bool = True
    error: str | None = None


def pooling_output(request: PoolingRequest) -> PoolingOutput:
    ids: Any = request.prompt_ids.tolist()
    return PoolingOutput(request.id, ids, request.result, request.finished, request.error)
