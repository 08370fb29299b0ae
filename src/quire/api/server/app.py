"""The applications: routes, errors and limits put together."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire import __version__
from quire.api.server.errors import install_handlers
from quire.api.server.http.bodies import Bodies
from quire.api.server.http.compression import CompressedReads
from quire.api.server.http.head_requests import HeadRequests
from quire.api.server.http.hosts import HostCheck
from quire.api.server.http.json_answers import JsonAnswer
from quire.api.server.http.request_ids import HEADERS, RequestIds
from quire.api.server.keys import Keys
from quire.api.server.routes import (
    adapters,
    batches,
    cache,
    chat,
    completions,
    docs,
    embeddings,
    files,
    health,
    messages,
    metrics,
    models,
    page,
    responses,
    scores,
    starting,
    tokenize,
)
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState

ROUTERS = [
    models.router,
    completions.router,
    chat.router,
    messages.router,
    responses.router,
    embeddings.router,
    scores.router,
    tokenize.router,
    cache.router,
    health.router,
    metrics.router,
    docs.router,
]


def make_app(state: ServerState) -> FastAPI:
    """The application with all routes, for a server whose engine has started."""
    app = _empty_app(state.settings, state.keys)
    app.state.server = state
    for router in [*ROUTERS, files.router, batches.router]:
        app.include_router(router)
    if state.settings.lora_folder is not None:
        app.include_router(adapters.router)
    if state.settings.page and state.client.pooling is None:  # it shows a chat and blocks
        app.include_router(page.router)
    return app


def make_inner_app(state: ServerState) -> FastAPI:
    """The routes alone, for requests that the server itself makes."""
    app = _App(openapi_url=None)
    install_handlers(app)
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    return app


def make_starting_app(settings: ServerConfig) -> FastAPI:
    """The application while the engine starts: health, and a 503 for all else."""
    app = _empty_app(settings)
    app.include_router(starting.router)
    return app


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """Request ids are the outermost layer: even a failure of the application has one."""
        return RequestIds(super().build_middleware_stack())


def _empty_app(settings: ServerConfig, keys: Keys | None = None) -> FastAPI:
    app = _App(
        title="Quire",
        version=__version__,
        description="OpenAI's API over a paged, shared and tiered KV cache.",
        default_response_class=JsonAnswer,
        docs_url=None,  # FastAPI's pages load scripts from other servers; ours is routes/docs.py
        redoc_url=None,
    )
    install_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(CompressedReads)
    app.add_middleware(HeadRequests)
    uploads = {files.UPLOADS: settings.max_file_bytes + files.FORM_BYTES}
    app.add_middleware(Bodies, max_bytes=settings.max_body_bytes, keys=keys, uploads=uploads)
    if settings.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[name.decode() for name in HEADERS],
        )
    app.add_middleware(HostCheck, settings=settings)
    return app
