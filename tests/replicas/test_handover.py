"""Prefill and decode apart: blocks go from one replica to the other by a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from patience import PATIENCE_S
from redis_server import RedisServer

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.replicas.fleet import Fleet
from quire.replicas.handover import roles
from quire.request_options import RequestOptions

pytestmark = pytest.mark.long

LONG, SHORT = list(range(5, 305)), list(range(5, 45))


@pytest.fixture
def redis(tmp_path):
    redis = RedisServer(tmp_path)
    yield redis
    redis.kill()


async def ask(fleet, prompt, salt=""):
    """Who answered, what, and where its prompt was found."""
    changed = asyncio.Event()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = np.array(prompt, dtype=np.int32)
    handle = fleet.submit(prompt, params, RequestOptions(cache_salt=salt), changed=changed)
    while not handle.finished:
        await asyncio.wait_for(changed.wait(), PATIENCE_S)
        changed.clear()
    answer = handle.take().samples[0].token_ids
    fleet.close(handle)
    return handle.engine, answer, handle.admission.cached_tokens_by_tier


async def computed(fleet):
    stats = [await client.call("stats") for client in fleet.engines.values()]
    return [each["tokens"]["computed"] for each in stats]


async def hand_over(config, monkeypatch):
    monkeypatch.setattr("quire.replicas.fleet.LOOK_S", 0.2)
    fleet = await Fleet.start(config, 2, num_prefill=1)
    try:
        for salt in ("", "again"):  # also when it knows how fast it could compute them
            before = await computed(fleet)
            engine, answer, by_tier = await ask(fleet, LONG, salt)
            assert (engine, by_tier) == ("1", {"remote": 288})  # 18 full blocks of 300 tokens
            prefill, decode = np.subtract(await computed(fleet), before)
            assert prefill == 288 and decode < 30  # the rest of the prompt, and the answer
        before = await computed(fleet)
        assert (await ask(fleet, SHORT, "other"))[0] == "1"  # not worth the detour
        assert (await ask(fleet, LONG))[2] == {"device": 299}  # it has them itself now
        assert (await computed(fleet))[0] == before[0]
        os.kill(fleet.engines["0"].pid, signal.SIGKILL)
        await fleet.replicas[0].client.died.wait()
        engine, alone, by_tier = await ask(fleet, LONG, "other")  # no other is up: it computes
        assert (engine, by_tier) == ("1", {"device": 32}) and alone == answer
        assert not fleet.num_open
        monkeypatch.setattr("quire.replicas.fleet.HUNG_S", 8.0)
        await asyncio.sleep(1.0)  # a request that looks now may still be ready to wait for minutes
        hanging = fleet.engines["1"]
        os.kill(hanging.pid, signal.SIGSTOP)
        await asyncio.wait_for(
            hanging.died.wait(), PATIENCE_S
        )  # it is ended, and another is started
    finally:
        assert await fleet.stop() == 0


def test_the_decode_replica_loads_what_the_prefill_replica_computed(tiny, redis, monkeypatch):
    config = EngineConfig(
        model=tiny,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        num_blocks=256,
        remote_cache_url=redis.url,
    )
    asyncio.run(hand_over(config, monkeypatch))


@pytest.mark.parametrize(
    ("num_replicas", "store", "says"),
    [(1, "redis://x", "leaves none"), (3, None, "remote_cache_url")],
)
def test_roles_that_cannot_work_are_refused(num_replicas, store, says):
    with pytest.raises(ConfigError, match=says):
        roles(num_replicas, 1, store)
    flags = ["--replicas", str(num_replicas), "--prefill-replicas", "1", "--port", "0"]
    flags += ["--remote-cache-url", store] if store else []
    command = [sys.executable, "-m", "quire", "serve", *flags]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=env)
    typed = says if " " in says else "--remote-cache-url"
    assert done.returncode == 2 and typed in done.stderr
