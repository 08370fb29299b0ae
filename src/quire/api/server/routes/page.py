"""`GET /`: the page, and the data behind it.

The page itself needs no key. Where keys are set, its data need one: a tenant sees its own
requests, texts and names, and of others only which blocks are taken; an operator sees all.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse

from quire import __version__
from quire.api.server.errors import ApiError
from quire.api.server.observer import FIRST
from quire.api.server.state import Caller, ServerState, State
from quire.errors import QuireError

FOLDER = Path(__file__).parent.parent / "page"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {path.name: path for path in FOLDER.iterdir() if path.suffix in KINDS}
# Nothing from elsewhere is loaded or asked, and no other site may show the page as its own.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)

Count = Annotated[int, Query(ge=0)]
Replica = Annotated[str, Query(max_length=20)]
SOON_S = 2.0


@router.get("/")
async def page() -> Response:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


@router.get("/page/{name}")
async def file(name: str) -> Response:
    path = FILES.get(name)
    if path is None:
        raise ApiError(404, f"There is no /page/{name[:200]} here.")
    return FileResponse(path, media_type=KINDS[path.suffix], headers=HEADERS)


@router.get("/page/data/live")
async def live(state: State, caller: Caller, replica: Replica = FIRST) -> dict[str, Any]:
    """What the curves are drawn from: counters since the start, and how things are now."""
    stats = await state.observer.stats(replica)
    now = time.monotonic()
    return {
        "version": __version__,
        "model": state.model_names[0],
        "max_model_len": state.client.limits.max_model_len,
        "now": now,
        "blocks": {name: stats["blocks"][name] for name in ("total", "free", "cached", "in_use")},
        "requests": stats["requests"],
        "tokens": stats["tokens"],
        "prefix": {name: stats["prefix"][name] for name in ("queries", "hits", "hits_by_tier")},
        "preemptions": stats["preemptions"],
        "first_tokens": state.observer.first_tokens(replica, caller),
        "sees_all": caller.sees_all,
    }


@router.get("/page/data/replicas")
async def replicas(state: State, caller: Caller) -> dict[str, Any]:
    """Which replicas are up, how many requests each has, and how full its cache is."""
    members = state.client.members()
    told = await asyncio.gather(*(_told(state, each["name"]) for each in members))
    return {"replicas": [each | more for each, more in zip(members, told, strict=True)]}


async def _told(state: ServerState, replica: str) -> dict[str, Any]:
    """The stats of a replica, if it answers."""
    try:
        stats = await state.observer.stats(replica, SOON_S)
    except QuireError:
        return {}
    prefix, blocks = stats["prefix"], stats["blocks"]
    return {
        "hit_rate": prefix["hits"] / prefix["queries"] if prefix["queries"] else 0.0,
        "computed": stats["tokens"]["computed"],
        "blocks": {name: blocks[name] for name in ("total", "free", "cached", "in_use")},
    }


@router.get("/page/data/blocks")
async def blocks(state: State, caller: Caller, replica: Replica = FIRST) -> Any:
    """The picture of every tier."""
    return await state.observer.ask("blocks", replica, tenant=caller.view)


@router.get("/page/data/blocks/{number}")
async def block(
    number: int,
    state: State,
    caller: Caller,
    count: Annotated[int, Query(ge=1, le=4096)] = 1,
    replica: Replica = FIRST,
) -> Any:
    """One block; of `count` neighbours, the busiest."""
    total = (await state.observer.stats(replica))["blocks"]["total"]
    if not 0 <= number < total or count > total:
        raise ApiError(404, f"There are blocks 0 to {total - 1}; ask for one of them.")
    ask = state.observer.ask
    return await ask("block", replica, block=number, count=count, tenant=caller.view)


@router.get("/page/data/journal")
async def journal(
    state: State,
    caller: Caller,
    since: Count = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 40,
    replica: Replica = FIRST,
) -> Any:
    """Stories that have changed since a version."""
    ask = state.observer.ask
    return await ask("journal", replica, since=since, limit=limit, tenant=caller.view)
