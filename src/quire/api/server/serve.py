"""The server's life: listen, start the engine, serve, drain, end.

engine starts     /health answers 200, /ready and all else 503
SIGTERM, SIGINT   /ready and new requests get a 503; open requests go on until they
                  have ended, or `drain_seconds` are over; then the engine writes the
                  blocks on their way to lower tiers, and the server ends
a second signal   open requests are not waited for
engine dies       open requests end with an error, and the server with status 1; of several
                  replicas, one that dies is started again (`quire.replicas`)
SIGHUP            replicas are drained and started again, one after the other
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.server.app import ROUTERS, make_app, make_inner_app, make_starting_app
from quire.api.server.batch.in_process import endpoints_of
from quire.api.server.batch.service import Batches
from quire.api.server.batch.store import FileStore
from quire.api.server.chat_template_setting import read_chat_template
from quire.api.server.http.connection import HttpConnection
from quire.api.server.keys import Keys
from quire.api.server.models import check_adapter_settings
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState
from quire.api.server.supervisor import Supervisor
from quire.config import EngineConfig
from quire.engine.process.client import DIED, EngineClient
from quire.engine.process.service import Service
from quire.errors import ConfigError
from quire.gc_control import keep_for_good
from quire.metrics.request_log import write_bare_lines
from quire.models.pooling.facts import EMBED
from quire.progress import say, say_step
from quire.replicas.fleet import Fleet
from quire.replicas.handover import roles

log = logging.getLogger("quire.server")

POLL_S = 0.05
FAREWELL_S = 5  # for the last replies to be read once all is over
BACKLOG = 2048
SPARE_FILES = 256  # besides connections


def serve(settings: ServerConfig, engine: EngineConfig) -> int:
    """Serve until a signal ends it; returns the exit status."""
    # Mistakes are found before a model is loaded.
    keys = Keys.read(settings.api_keys_file)
    check_adapter_settings(settings, keys)
    if settings.has_adapters:
        engine = replace(engine, enable_lora=True)
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    roles(settings.replicas, settings.prefill_replicas, engine.remote_cache_url)
    with _listen(settings) as listener:
        if settings.replicas > 1:
            return Supervisor(settings, engine, listener).run()
        return serve_on(listener, settings, engine)


def serve_on(
    listener: socket.socket,
    settings: ServerConfig,
    engine: EngineConfig,
    lifeline: TextIO | None = None,
) -> int:
    """Serve in this process; when `lifeline` is closed, the server ends as on SIGTERM."""
    keys = Keys.read(settings.api_keys_file)
    write_bare_lines()
    _allow_open_files(settings.max_connections + SPARE_FILES)
    store = FileStore(settings) if settings.batch_dir is not None else None
    try:
        return _run(_serve(settings, engine, keys, store, listener, lifeline))
    finally:
        if store is not None:
            store.close()


def _run(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return int(uvloop.run(main))


def _listen(settings: ServerConfig) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; "
            "choose others with --host and --port."
        ) from None
    return listener


def _allow_open_files(count: int) -> None:
    """Every connection is an open file; many systems allow 1,024 unless a process asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(
    settings: ServerConfig,
    engine: EngineConfig,
    keys: Keys,
    store: FileStore | None,
    listener: socket.socket,
    lifeline: TextIO | None,
) -> int:
    signals = Signals(lifeline)
    say_step(f"listening on {_address(listener)}; starting the engine, which imports torch")
    starting = asyncio.create_task(_start(settings, engine))
    app = SwitchableApp(make_starting_app(settings))
    server = _make_server(app, settings)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await signals.or_done(starting)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        client = starting.result()
        if isinstance(client, Fleet):
            signals.on_hangup(partial(client.restart, settings.drain_seconds))
        state = ServerState(settings, client, engine.model, keys)
        try:
            await state.models.load_modules(settings.lora_modules)
        except ConfigError:
            await client.stop()
            raise
        await state.observer.start()
        if store is not None:
            endpoints = endpoints_of(ROUTERS)
            inner = make_inner_app(state)
            state.batches = Batches(settings, store, inner, endpoints, keys.tenants())
        app.current = make_app(state)
        keep_for_good()
        say(_greeting(listener, state))
        is_well = await _until_the_end(state, signals, serving)
    finally:
        server.should_exit = True
        await serving
    if is_well:
        return 0
    print(f"error: {DIED}", file=sys.stderr)
    return 1


async def _start(settings: ServerConfig, engine: EngineConfig) -> Service:
    """Start one engine, or the replicas."""
    if settings.replicas == 1:
        return await EngineClient.start(engine, progress=True, journal=settings.page)
    return await Fleet.start(
        engine,
        settings.replicas,
        settings.routing,
        progress=True,
        num_prefill=settings.prefill_replicas,
        journal=settings.page,
    )


async def _until_the_end(state: ServerState, signals: Signals, serving: asyncio.Task[None]) -> bool:
    """Serve until told to end, and drain; True if the engine ended only then, and well."""
    client = state.client
    dying = asyncio.create_task(client.died.wait())
    await signals.or_done(serving, dying)
    await state.stop_batches()
    if client.is_alive:
        await _drain(state, signals)
    is_well = client.is_alive
    state.observer.close()
    return await client.stop() == 0 and is_well


async def _drain(state: ServerState, signals: Signals) -> None:
    """Take no more requests, and wait up to `drain_seconds` for the open ones."""
    state.admission.draining = True
    signals.asked.clear()  # the next signal ends the wait
    client, loop = state.client, asyncio.get_running_loop()
    if client.num_open:
        wait = "Open requests: %d. They have up to %g s to end; a second signal ends them at once."
        log.info(wait, client.num_open, state.settings.drain_seconds)
    deadline = loop.time() + state.settings.drain_seconds
    while client.num_open and client.is_alive and not signals.asked.is_set():
        if loop.time() > deadline:
            break
        await asyncio.sleep(POLL_S)
    client.abandon("The server shut down before the answer was whole; ask again.")


class Signals:
    """SIGTERM and SIGINT as an event, and the end of the process that started this one."""

    def __init__(self, lifeline: TextIO | None = None) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.asked.set)
        if lifeline is not None:
            self._loop.add_reader(lifeline, self._lost, lifeline)

    def _lost(self, lifeline: TextIO) -> None:
        self._loop.remove_reader(lifeline)
        self.asked.set()

    def on_hangup(self, act: Callable[[], None]) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, act)

    async def or_done(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for a signal, or for one of `tasks` to be done."""
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({asked, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()


class SwitchableApp:
    """Passes every request on to `current`: the starting application, then the whole one."""

    def __init__(self, current: ASGIApp) -> None:
        self.current = current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.current(scope, receive, send)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`Signals` handles them."""
        yield


def _make_server(app: SwitchableApp, settings: ServerConfig) -> _Server:
    connection: Any = partial(HttpConnection, settings)
    config = uvicorn.Config(
        app,
        http=connection,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=FAREWELL_S,
    )
    return _Server(config)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _greeting(listener: socket.socket, state: ServerState) -> str:
    address = _address(listener)
    route, body = _example(state)
    has_page = state.settings.page and state.client.pooling is None
    page = " (a page for people, /v1 for programs)" if has_page else ""
    key = " -H 'Authorization: Bearer KEY'" if state.keys else ""
    return (
        f"Quire serves {state.model_names[0]} at {address}{page}\n"
        f"  curl {address}{route} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    )


def _example(state: ServerState) -> tuple[str, dict[str, Any]]:
    """A request that this model can answer."""
    named, facts = {"model": state.model_names[0]}, state.client.pooling
    if facts is None:
        return "/v1/completions", {**named, "prompt": "The capital of France is"}
    if facts.task == EMBED:
        return "/v1/embeddings", {**named, "input": "The capital of France is Paris."}
    if facts.size == 1:
        documents = ["It is Paris.", "It rains."]
        return "/v1/rerank", {**named, "query": "The capital of France", "documents": documents}
    return "/classify", {**named, "input": "The capital of France is Paris."}
