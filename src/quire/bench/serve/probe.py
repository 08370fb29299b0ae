"""One short request before the load: whether the server answers at all, and as whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp

from quire.bench.serve.answer import Outcome
from quire.bench.serve.client import ask, clock, open_session
from quire.bench.serve.prompts import BlockPrompt
from quire.bench.serve.target import Target, without_secrets
from quire.bench.serve.workload import Request
from quire.errors import QuireError

FEW_TOKENS = 4
REFUSALS = ("HTTP 400", "HTTP 422")
MENDS = {
    "no connection": "start the server, or give another --url",
    "HTTP 401": "give the right --api-key",
    "HTTP 403": "give the right --api-key",
    "HTTP 404": "give another --url or --model",
    "no stream": "choose a server that streams, or another --api",
}


def probe(target: Target) -> Target:
    """The target with a model's name; a server that cannot answer is said here, in one sentence."""
    return asyncio.run(_probe(target))


async def _probe(target: Target) -> Target:
    async with open_session(target) as session:
        if not target.model:
            target = replace(target, model=await _first_model(session, target))
        outcome = await _answer(session, target)
        if target.with_ids and outcome.error in REFUSALS:  # not every server knows that field
            target = replace(target, with_ids=False)
            outcome = await _answer(session, target)
        if outcome.error is not None:
            raise _failure(target.url, outcome)
    return target


async def _answer(session: aiohttp.ClientSession, target: Target) -> Outcome:
    outcome = Outcome(at=0.0, num_asked=FEW_TOKENS)
    request = Request(0.0, BlockPrompt((), 4 * FEW_TOKENS, own="first"), FEW_TOKENS)
    await ask(session, target, target.body(request), outcome, clock())
    return outcome


async def _first_model(session: aiohttp.ClientSession, target: Target) -> str:
    url = f"{target.base}/models"
    outcome = Outcome(at=0.0, num_asked=0)
    try:
        async with session.get(url) as response:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", (await response.text())[:200])
            else:
                return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientConnectorError, OSError) as error:
        outcome.fail("no connection", getattr(error, "strerror", None) or str(error))
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError, TypeError) as error:
        outcome.fail("no list of models", f"{type(error).__name__}; give --model")
    raise _failure(url, outcome)


def _failure(url: str, outcome: Outcome) -> QuireError:
    kind = str(outcome.error)
    says = " ".join(outcome.message.split())[:200].rstrip(".")
    mend = MENDS.get(kind, "see to the server, or give another --url or --model")
    return QuireError(
        f"A first request to {without_secrets(url)} failed ({kind}{': ' + says if says else ''}); "
        f"{mend}."
    )
