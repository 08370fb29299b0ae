"""`GET /metrics`: without a key, since it has only counts and no text of any request."""

from __future__ import annotations

from fastapi import APIRouter, Response

from quire.api.server.state import State
from quire.metrics.prometheus import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """For Prometheus: the cache as `quire_…`, requests as `vllm:…`."""
    return Response(await state.observer.metrics_text(), media_type=CONTENT_TYPE)
