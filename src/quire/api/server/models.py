"""Which models clients may ask for: the base model's names, and those of adapters over it.

An adapter's name is there when an engine has read its folder, and stands for these contents from
then on. When it is unloaded, or loaded again with other contents, the name changes its meaning at
once; requests that have begun go on with what they began with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import count

from quire.api.server.errors import ApiError, bad_request
from quire.api.server.keys import Keys
from quire.api.server.settings import ServerConfig
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.service import Service
from quire.errors import ConfigError, QuireError
from quire.lora_request import LoRARequest, is_adapter_name, read_module

MOST_ADAPTERS = 4096  # names
MOST_SHOWN = 8  # of the names that there are, in an error
LOOK_S = 0.02  # between questions whether a folder is read
PATIENCE_S = 600.0


@dataclass(frozen=True)
class ServedAdapter:
    asked: LoRARequest  # as requests ask for it, with the fingerprint of its contents
    loaded: int  # when, in seconds since 1970


def check_adapter_settings(settings: ServerConfig, keys: Keys) -> None:
    if settings.lora_folder is not None and not keys:
        raise ConfigError(
            "lora_folder lets callers load adapters, with API keys; set api_keys_file."
        )


class ServedModels:
    """Everything is called from one event loop."""

    def __init__(self, base_names: tuple[str, ...], client: Service) -> None:
        self.base_names = base_names
        self.adapters: dict[str, ServedAdapter] = {}
        self._client = client
        self._numbers = count(1)
        self._being_loaded: set[str] = set()

    @property
    def names(self) -> list[str]:
        return [*self.base_names, *self.adapters]

    def served(self, model: str | None) -> str:
        """The name to answer with; ApiError for a model that is not here."""
        if model is None:
            return self.base_names[0]
        if model not in self.base_names and model not in self.adapters:
            names = self.names
            more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
            raise ApiError(
                404,
                f"The model {model[:200]!r} is not served here; there is "
                f"{', '.join(names[:MOST_SHOWN])}{more}.",
                code="model_not_found",
                param="model",
            )
        return model

    def adapter(self, model: str | None) -> LoRARequest | None:
        """That of a name which is served; None for the base model."""
        found = self.adapters.get(self.served(model or None))
        return None if found is None else found.asked

    # --- loading --------------------------------------------------------------------------------

    async def load_modules(self, modules: Iterable[str]) -> None:
        """Those that the settings name; ConfigError if one cannot be loaded."""
        try:
            for module in map(read_module, modules):
                await self.load(module.name, module.path)
        except QuireError as error:
            raise ConfigError(f"lora_modules cannot be served: {error}") from None

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Have an engine read a folder, and serve it under a name.

        The others read it when they get a request for it. With `in_place` the name may be one that
        is served already.
        """
        self._check_name(name, in_place)
        self._being_loaded.add(name)
        try:
            asked = LoRARequest(name, next(self._numbers), path)
            fingerprint = await self._read(asked)
        finally:
            self._being_loaded.discard(name)
        before = self.adapters.get(name)
        self.adapters[name] = ServedAdapter(
            replace(asked, fingerprint=fingerprint), int(time.time())
        )
        if before is not None:
            await self._forget(before.asked)

    async def unload(self, name: str) -> None:
        """Serve it no longer; what was read goes when its last request has ended."""
        if name not in self.adapters:
            raise ApiError(
                404, f"No adapter {name[:200]!r} is loaded.", code="not_found", param="lora_name"
            )
        await self._forget(self.adapters.pop(name).asked)

    def _check_name(self, name: str, in_place: bool) -> None:
        if not is_adapter_name(name):
            raise bad_request(
                "lora_name must be a short text that can be printed.", param="lora_name"
            )
        if name in self.base_names:
            raise bad_request(f"{name!r} is the base model's name.", param="lora_name")
        if name in self._being_loaded:
            raise bad_request(f"The adapter {name!r} is being loaded; wait.", param="lora_name")
        if name in self.adapters and not in_place:
            raise bad_request(
                f"The adapter {name!r} is loaded already; unload it first, or set load_inplace.",
                param="lora_name",
            )
        if len(self.adapters) + len(self._being_loaded) >= MOST_ADAPTERS:
            raise bad_request(f"{MOST_ADAPTERS:,} adapters are loaded already; unload some.")

    async def _read(self, asked: LoRARequest) -> str:
        """Wait until an engine has read it; returns the fingerprint of its contents."""
        engine = _any(self._client)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            told = await engine.call("adapter_read", asked=asdict(asked))
            if told is not None and "error" in told:
                raise bad_request(told["error"], param="lora_path")
            if told is not None:
                return str(told["fingerprint"])
            await asyncio.sleep(LOOK_S)
        raise ApiError(503, f"{asked.lora_path} is still being read; try again.", code="busy")

    async def _forget(self, asked: LoRARequest) -> None:
        told = (
            e.call("adapter_forget", asked=asdict(asked)) for e in self._client.engines.values()
        )
        await asyncio.gather(*told, return_exceptions=True)  # one that dies has forgotten it, too


def _any(client: Service) -> EngineLink:
    for engine in client.engines.values():
        return engine
    raise QuireError("No engine is up to read the adapter; try again.")
