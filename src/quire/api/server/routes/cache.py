"""`/v1/cache/…`: what the caller has in the cache is listed, pinned and deleted, in every tier.

Only with API keys: without, a client could delete what another one uses. A caller reaches its own
tenant's blocks; an operator lists all, and deletes and pins its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter

from quire.api.server.errors import ApiError, bad_request
from quire.api.server.keys import Tenant
from quire.api.server.schema.cache import DeleteRequest, PinRequest, PrefixRequest
from quire.api.server.state import Caller, ServerState, State
from quire.engine.limits import checked_ids
from quire.kv.keys import ADAPTER_MARK, adapter_namespace

router = APIRouter()

LOOK_S = 0.05  # between questions whether lower tiers are done
PATIENCE_S = 120.0


@router.get("/v1/cache")
async def held(state: State, caller: Caller) -> dict[str, Any]:
    """How many blocks each tier holds of the caller's, or of all for an operator."""
    return await _in_every_engine(state, "cache_list", view=caller.view)


@router.post("/v1/cache/pin")
async def pin(body: PinRequest, state: State, caller: Caller) -> dict[str, Any]:
    """Keep a prefix for some seconds in the tiers that have it and can."""
    tokens, salt = await _tokens(body, state), _salt(body, state, caller)
    args = {"tokens": tokens, "salt": salt, "seconds": body.seconds}
    return await _in_every_engine(state, "cache_pin", **args)


@router.post("/v1/cache/delete")
async def delete(body: DeleteRequest, state: State, caller: Caller) -> dict[str, Any]:
    """Delete a prefix with all that continues it, or everything of the caller's."""
    if body.everything:
        if body.prompt is not None or body.messages is not None or body.tokens is not None:
            raise bad_request("Give either a prefix or everything.", param="everything")
        return await _in_every_engine(state, "cache_delete_tenant", tenant=caller.salt)
    tokens, salt = await _tokens(body, state), _salt(body, state, caller)
    return await _in_every_engine(state, "cache_delete", tokens=tokens, salt=salt)


def _salt(body: PrefixRequest, state: ServerState, caller: Tenant) -> str:
    """Where the prefix lies: with an adapter apart from those of others."""
    if ADAPTER_MARK in body.cache_salt:
        raise bad_request("cache_salt has the character U+0000 in it; leave that out.")
    adapter = state.models.adapter(body.model)
    salt = caller.namespace(body.cache_salt)
    return salt if adapter is None else adapter_namespace(salt, adapter.fingerprint)


async def _tokens(body: PrefixRequest, state: ServerState) -> list[int]:
    state.served(body.model)
    if [body.prompt, body.messages, body.tokens].count(None) != 2:
        raise bad_request("Give one of prompt, messages and tokens.", param="prompt")
    limits = state.client.limits
    given: Any = body.tokens
    if body.prompt is not None:
        given = await state.reader.encode(body.prompt, True)
    elif body.messages is not None:
        tool_use = state.tool_use(None, None, None)
        messages, variables = tool_use.conversation(body.messages, {})
        given = (await state.reader.read_chat(messages, False, variables)).token_ids.tolist()
    if not isinstance(given, list) or not 0 < len(given) <= limits.max_model_len:
        raise bad_request(
            f"A prefix is a list of 1 to {limits.max_model_len:,} token ids, or a text of as many.",
            param="tokens" if body.tokens is not None else "prompt",
        )
    ids: list[int] = checked_ids(given, limits.vocab_size).tolist()
    return ids


async def _in_every_engine(state: ServerState, name: str, **args: Any) -> dict[str, Any]:
    if not state.keys:
        raise ApiError(
            403,
            "The cache is controlled with an API key; start the server with --api-keys-file.",
            code="keys_needed",
        )
    engines = state.client.engines.items()
    found = await asyncio.gather(*(_ask(engine, name, args) for _, engine in engines))
    return {"blocks": _sums(found)}


async def _ask(engine: Any, name: str, args: dict[str, Any]) -> dict[str, int | None]:
    number, until = (await engine.call(name, **args))["number"], time.monotonic() + PATIENCE_S
    if number is None:
        raise ApiError(503, "The tiers have too much to do; ask again later.", code="busy")
    while time.monotonic() < until:
        result: dict[str, int | None] | None = await engine.call("cache_result", number=number)
        if result:
            return result
        if result is not None:
            break
        await asyncio.sleep(LOOK_S)
    raise ApiError(503, "The tiers are still at it; ask later what is held.", code="busy")


def _sums(found: Iterable[dict[str, int | None]]) -> dict[str, int | None]:
    """By tier, over all engines. A store that engines share is counted by each: the most counts."""
    sums: dict[str, int | None] = {}
    for counts in found:
        for tier, count in counts.items():
            before = sums.get(tier)
            if count is None or before is None:
                sums[tier] = before if count is None else count
            else:
                sums[tier] = max(before, count) if tier == "remote" else before + count
    return sums
