"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`.

They are there only where `lora_folder` says which folders may be loaded, and with API keys.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from quire.api.server.adapter_folder import folder_below
from quire.api.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.api.server.state import Caller, State

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load(body: LoadAdapterRequest, state: State, caller: Caller) -> Response:
    """Serve the adapter in a folder under a name; the answer comes when it is read and fits."""
    assert state.settings.lora_folder is not None
    path = await asyncio.to_thread(folder_below, state.settings.lora_folder, body.lora_path)
    await state.models.load(body.lora_name, path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload(body: UnloadAdapterRequest, state: State, caller: Caller) -> Response:
    """Serve an adapter no longer; requests that have begun are answered."""
    await state.models.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
