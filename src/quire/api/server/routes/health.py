"""`GET /health`, `/ready` and `/version`: without a key, for load balancers and monitors."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from quire import __version__
from quire.api.server.state import State

router = APIRouter()


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(state: State) -> Response:
    """200 while the engine lives."""
    if state.client.is_alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "the engine has died"}, 503)


@router.get("/ready")
@router.get("/v1/ready", include_in_schema=False)
async def ready(state: State) -> Response:
    """200 while new requests are taken; 503 from the moment the server is told to end."""
    client, draining = state.client, state.admission.draining
    if client.is_alive and client.is_ready and not draining:
        return JSONResponse({"status": "ready"})
    status = "shutting down" if draining else "every replica is starting"
    if not client.is_alive:
        status = "the engine has died"
    return JSONResponse({"status": status}, 503)


@router.get("/version")
@router.get("/v1/version", include_in_schema=False)
async def version() -> dict[str, str]:
    return {"version": __version__}
