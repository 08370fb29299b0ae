"""Loading and unloading of adapters, as calls that another process may make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.adapters.source import AdapterSource
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.lora_request import LoRARequest


class AdapterCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._being_read: dict[LoRARequest, AdapterSource] = {}

    def named(self) -> dict[str, Callable[..., Any]]:
        return {"adapter_read": self.read, "adapter_forget": self.forget}

    def read(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """What a folder has, or why it cannot be used; None while it is being read."""
        adapters, lora = self._adapters(), LoRARequest(**asked)
        source = self._being_read.get(lora)
        if source is None:
            source = self._being_read[lora] = adapters.find(lora)
        if not source.is_read:
            return None
        del self._being_read[lora]
        if not self._engine.has_unfinished_requests():  # else the next step does it
            adapters.take_read(in_use=())
        info, error = source.reading.result()
        if error is not None:
            return {"error": error}
        assert info is not None
        return {"fingerprint": info.fingerprint}

    def forget(self, asked: dict[str, Any]) -> None:
        """No further request will ask for it."""
        self._adapters().forget(LoRARequest(**asked))

    def _adapters(self) -> AdapterCatalog:
        if self._engine.adapters is None:
            raise RequestError("This engine takes no adapters; set enable_lora.")
        return self._engine.adapters
