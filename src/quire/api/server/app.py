"""The applications: routes, errors and limits put together."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire import __version__
from quire.api.server.body_limit import BodyLimit
from quire.api.server.errors import install_handlers
from quire.api.server.routes import (
    chat,
    completions,
    health,
    metrics,
    models,
    page,
    starting,
    words,
)
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState

ROUTERS = [
    models.router,
    completions.router,
    chat.router,
    words.router,
    health.router,
    metrics.router,
]


def make_app(state: ServerState) -> FastAPI:
    """What there is to ask once the engine is there."""
    app = _empty_app(state.settings)
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    if state.settings.page:
        app.include_router(page.router)
    return app


def make_starting_app(settings: ServerConfig) -> FastAPI:
    """What there is to ask until then."""
    app = _empty_app(settings)
    app.include_router(starting.router)
    return app


def _empty_app(settings: ServerConfig) -> FastAPI:
    app = FastAPI(
        title="Quire",
        version=__version__,
        description="OpenAI's API over a paged, shared and tiered KV cache.",
        docs_url=None,  # FastAPI's pages load scripts from other people's servers
        redoc_url=None,
    )
    install_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origin),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
