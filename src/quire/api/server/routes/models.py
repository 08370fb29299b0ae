"""`GET /v1/models`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter

from quire.api.server.state import Caller, ServerState, State

router = APIRouter()


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(state: State, caller: Caller) -> dict[str, Any]:
    """The names by which the model is served, and those of its adapters."""
    names = state.models.names
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [_model(state, name) for name in names], **pages}


@router.get("/v1/models/{name:path}")
@router.get("/models/{name:path}", include_in_schema=False)
async def model(name: str, state: State, caller: Caller) -> dict[str, Any]:
    """One of these models; all of them if the address has no name."""
    return _model(state, state.served(name)) if name else await models(state, caller)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    """With the fields of OpenAI's API, and of Anthropic's."""
    base, adapter = state.model_names[0], state.models.adapters.get(name)
    created = state.started if adapter is None else adapter.loaded
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": base if adapter is None else adapter.asked.lora_path,
        "parent": None if adapter is None else base,
        "max_model_len": state.client.limits.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
    }
