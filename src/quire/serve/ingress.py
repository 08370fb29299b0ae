"""The server of `quire serve`, before replicas that Ray keeps."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from quire.api.server.app import make_app
from quire.api.server.keys import Keys
from quire.api.server.models import check_adapter_settings
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState
from quire.config import EngineConfig
from quire.engine.process.messages import Message
from quire.serve.ray_fleet import RayFleet


class Ingress:
    """What `serve.ingress` makes an ASGI application of."""

    async def __init__(  # type: ignore[misc]
        self, settings: Message, engine: Message, engines: Any
    ) -> None:
        """`engines` is the handle of the deployment of replicas."""
        # Where Ray's proxies listen is theirs to know: any address may be one of them.
        server = ServerConfig(**{**settings, "host": "0.0.0.0"})
        config = EngineConfig.create(**engine)
        keys = Keys.read(server.api_keys_file)
        check_adapter_settings(server, keys)
        self._fleet = await RayFleet.start(engines, engine, server.routing, config.block_size)
        self._state = ServerState(server, self._fleet, config.model, keys)
        await self._state.models.load_modules(server.lora_modules)
        await self._state.observer.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._state)

    async def __del__(self) -> None:
        if hasattr(self, "_state"):  # it may not have come so far
            self._state.observer.close()
            await self._fleet.stop()
