"""Requests while no replica is up: they wait, within bounds, and are told how it ended."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from patience import PATIENCE_S

from quire.config import EngineConfig
from quire.engine.pooling.request import TextsAsked
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.messages import unpack_options
from quire.engine.process.request_handle import EngineDied, RequestFailed
from quire.kv.keys import Namespace
from quire.lora_request import LoRARequest
from quire.params import SamplingParams
from quire.pooling_params import PoolingParams
from quire.replicas.dispatcher import Dispatcher
from quire.replicas.prefix_router import PrefixRouter
from quire.replicas.replica import Replica
from quire.request_options import RequestOptions

PROMPT = np.arange(40, dtype=np.int32)


def dispatcher():
    made = Dispatcher([Replica(name, EngineConfig()) for name in "01"], PrefixRouter(4))
    made.namespace = Namespace("model", "float32", "float32", 4, "layout", "rope")
    return made


def submit(made, queue_s=60.0):
    return made.submit(PROMPT, SamplingParams(), RequestOptions(queue_s=queue_s))


def test_a_request_waits_no_longer_than_in_a_queue():
    async def wait():
        made = dispatcher()
        handle = submit(made, queue_s=0.01)
        assert (made.num_waiting, made.num_waiting_tokens) == (1, 40)
        await asyncio.wait_for(handle.changed.wait(), PATIENCE_S)
        with pytest.raises(RequestFailed, match="No replica could take") as caught:
            handle.take()
        assert caught.value.kind == "queue"
        assert made.num_waiting == 0 and made.num_open == 1
        made.close(handle)
        assert made.num_open == 0

    asyncio.run(wait())


def test_a_server_that_ends_does_not_leave_them_waiting():
    async def wait():
        made = dispatcher()
        handles = [submit(made) for _ in range(3)]
        made.close(handles.pop())
        assert made.num_waiting == 2
        made.abandon("The server ends.")
        for handle in handles:
            with pytest.raises(RequestFailed, match="The server ends"):
                handle.take()
            made.close(handle)
        assert made.num_waiting == made.num_open == 0

    asyncio.run(wait())


def test_when_no_replica_will_come_all_are_told_and_no_more_are_taken():
    async def wait():
        made = dispatcher()
        handle = submit(made)
        made.give_up()
        with pytest.raises(EngineDied):
            handle.take()
        with pytest.raises(EngineDied):
            submit(made)

    asyncio.run(wait())


class Engine(EngineLink):
    """Notes the numbers of its requests, and answers none."""

    is_alive = True

    def __init__(self, name):
        super().__init__(name)
        self.taken = []

    def _send_request(self, handle, request):
        self.taken.append(unpack_options(request["options"]))

    def _abort(self, handle): ...

    async def call(self, name, **args): ...


def test_a_request_goes_where_its_adapter_was_sent_before_unless_that_is_far_busier():
    async def place():
        made = dispatcher()
        for replica in made.replicas:
            made._router.join(replica.name)
            replica.client, replica.state = Engine(replica.name), "up"

        def send(adapter, salt):
            lora = LoRARequest(adapter, 1, "path", fingerprint=adapter) if adapter else None
            options = RequestOptions(cache_salt=salt, lora_request=lora)
            return made.submit(PROMPT, SamplingParams(), options).engine

        first, second = send("f1", "a"), send("f2", "b")
        assert {first, second} == {"0", "1"}
        for number in range(20):  # each with a prompt that no replica has
            assert send("f1", f"x{number}") == first
        assert send("f2", "c") == second and send("", "d") == second
        assert made.replicas[int(first)].client.taken[-1].lora_request.fingerprint == "f1"
        names = [send("f1", f"y{number}") for number in range(60)]
        assert set(names) == {first, second}

    asyncio.run(place())


def test_texts_that_are_only_read_go_to_the_least_loaded():
    """Their engines keep no blocks, and so have no names for any."""

    class Up(Replica):
        is_up = True

    class Client:
        def __init__(self):
            self.placed = []

        def place(self, handle, request):
            self.placed.append(request["params"])

    async def place():
        replicas = [Up(name, EngineConfig(), client=Client()) for name in "01"]
        made = Dispatcher(replicas, PrefixRouter(4))
        made.namespace = None
        for name in "01":
            made._router.join(name)
        for _ in range(6):
            made.submit(PROMPT, TextsAsked(PoolingParams(dimensions=2), [len(PROMPT)]))
        assert [replica.client.placed for replica in replicas] == [
            [{"pooling": {"dimensions": 2}, "lengths": [len(PROMPT)], "seconds": []}] * 3
        ] * 2

    asyncio.run(place())
