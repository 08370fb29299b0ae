"""What load balancers and monitors ask, without a key: health, load and version; and, with one,
what is served how."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from quire import __version__
from quire.api.server.state import Caller, State

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


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(state: State) -> Response:
    """The same as `/health`, under the name that SageMaker has for it."""
    return await health(state)


@router.get("/load")
@router.get("/v1/load", include_in_schema=False)
async def load(state: State) -> dict[str, int]:
    """How many requests are open, and how many of them wait for their turn."""
    return {"server_load": state.client.num_open, "waiting": state.client.num_waiting}


@router.get("/server_info")
@router.get("/v1/server_info", include_in_schema=False)
async def server_info(state: State, caller: Caller) -> dict[str, Any]:
    """What is served, and how its answers are read."""
    limits, answers = state.client.limits, state.answer_format
    thoughts = answers.thoughts
    return {
        "version": __version__,
        "models": list(state.model_names),
        "started": state.started,
        "max_model_len": limits.max_model_len,
        "vocab_size": limits.vocab_size,
        "scheduling_policy": limits.policy,
        "tool_format": answers.calls.name,
        "has_reasoning": answers.has_thoughts and not answers.merges,
        "reasoning_tags": [thoughts.open, thoughts.close] if thoughts is not None else None,
    }


@router.get("/version")
@router.get("/v1/version", include_in_schema=False)
async def version() -> dict[str, str]:
    return {"version": __version__}
