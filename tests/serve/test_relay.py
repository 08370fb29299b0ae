"""Updates of a request on their way through another process: all of them, once, in order."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.engine.process.request_handle import EngineDied, RequestFailed, RequestHandle
from quire.serve.relay import Relay, deliver


def test_news_arrive_as_they_were_told() -> None:
    async def run() -> None:
        relay, handle = Relay(1, 5), RequestHandle(7, 5, asyncio.Event())
        admitted = {"num_cached_tokens": 16, "cached_tokens_by_tier": {"device": 16}}
        relay.add({"number": 1, "admitted": admitted, "samples": [{"sample": 0, "token_ids": [3]}]})
        relay.draw(0, 4)
        deliver(handle, await relay.relayed())
        assert handle.admission is not None and handle.admission.num_cached_tokens == 16
        relay.draw(0, 5)
        counts = {"output_tokens": 4, "longest_sample": 4}
        ended = {**counts, "finish_reason": "length", "stages": [("queued", 10.0)]}
        last = {"sample": 0, "token_ids": [6], "finish_reason": "length"}
        relay.add({"number": 1, "samples": [last], "finished": True, "ended": ended})
        assert relay.finished and not relay.is_done
        _, items = await relay.relayed()
        assert relay.is_done
        deliver(handle, (time.monotonic() - 100.0, items))  # from a machine whose clock is behind
        update = handle.take()
        assert update is not None and update.samples[0].token_ids == [3, 4, 5, 6]
        assert update.finished and update.samples[0].finish_reason == "length"
        assert handle.ending is not None
        assert handle.ending.stages[0][1] == pytest.approx(110.0, abs=1)

    asyncio.run(run())


def test_an_error_of_the_request_is_passed_on_and_the_engines_end_is_raised() -> None:
    async def run() -> None:
        relay, handle = Relay(1, 5), RequestHandle(7, 5, asyncio.Event())
        relay.add({"number": 1, "error": "Too long.", "error_kind": "request"})
        deliver(handle, await relay.relayed())
        with pytest.raises(RequestFailed, match="Too long"):
            handle.take()
        assert relay.is_done

        lost = Relay(2, 5)
        lost.draw(0, 4)
        lost.fail(EngineDied("gone"))
        assert not lost.is_done
        with pytest.raises(EngineDied):
            await lost.relayed()

    asyncio.run(run())
