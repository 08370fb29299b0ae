"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LoadAdapterRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # the name may be one that is served already


class UnloadAdapterRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str
