"""The application: routes, errors and limits put together."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire import __version__
from quire.api.server.body_limit import BodyLimit
from quire.api.server.errors import install_handlers
from quire.api.server.routes import chat, completions, health, metrics, models, page, words
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
    app = FastAPI(
        title="Quire",
        version=__version__,
        description="OpenAI's API over a paged, shared and tiered KV cache.",
        docs_url=None,  # FastAPI's pages load scripts from other people's servers
        redoc_url=None,
    )
    app.state.server = state
    install_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if state.settings.page:
        app.include_router(page.router)
    app.add_middleware(BodyLimit, max_bytes=state.settings.max_body_bytes)
    if state.settings.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.allowed_origin),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
