"""Wherever a prefix comes from, the answer is the same: token for token that of `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from effort import effort
from patience import PATIENCE_S

from quire import LLM, SamplingParams
from quire.errors import ConfigError

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
PROMPTS = json.loads((HERE.parent / "golden" / "smollm2.json").read_text())["prompts"]
LONG = [i for i, prompt in enumerate(PROMPTS) if 150 <= len(prompt["ids"]) <= 400][: effort(2, 4)]
TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ids(which=LONG):
    return [PROMPTS[i]["ids"] for i in which]


def check(answers, which=LONG):
    """No golden token has a near rival, so there is one right answer."""
    for at, answer in zip(which, answers, strict=True):
        assert answer == PROMPTS[at]["new_ids"][:TOKENS], PROMPTS[at]["name"]


def is_all(found, which=LONG):
    """All full blocks of the prompts; of the last ones, whose end is computed, a part or none."""
    rests = [(len(PROMPTS[i]["ids"]) - 1) % 16 for i in which]
    most = sum(len(PROMPTS[i]["ids"]) - 1 for i in which)
    return most - sum(rests) <= sum(found.values()) <= most


def came_from(tier, found):
    """All that can be cached was; what several prompts share came to the device with the first."""
    return found.get(tier, 0) > 0 and found.keys() <= {tier, "device"} and is_all(found)


def open_llm(device, **settings):
    return LLM("smollm2", device=device, dtype="float32", use_tqdm=False, **settings)


def generate(llm, which=LONG):
    """Answers, checked, and how many of the prompts' tokens came from where."""
    outputs = llm.generate(ids(which), PARAMS, use_tqdm=False)
    check([output.outputs[0].token_ids for output in outputs], which)
    total: dict[str, int] = {}
    for output in outputs:
        for tier, tokens in output.cached_tokens_by_tier.items():
            total[tier] = total.get(tier, 0) + tokens
    return total


def forget_device(llm):
    assert llm.engine.scheduler.tiering.store.flush(PATIENCE_S)
    llm.reset_prefix_cache(device_only=True)


@pytest.mark.parametrize("device", DEVICES)
def test_cold_from_the_device_and_from_host_memory(device):
    with open_llm(device, num_blocks=400, host_cache_bytes="256MiB") as llm:
        assert generate(llm).get("host", 0) == 0
        again = generate(llm)
        assert again.keys() == {"device"} and is_all(again)
        forget_device(llm)
        assert came_from("host", generate(llm))
        llm.reset_prefix_cache()
        assert generate(llm).get("host", 0) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_from_the_disk_also_after_a_restart(device, tmp_path):
    settings = {"ssd_cache_dir": str(tmp_path / "a"), "ssd_cache_bytes": "512MiB"}
    with open_llm(device, num_blocks=400, **settings) as llm:
        assert generate(llm).get("ssd", 0) == 0
        forget_device(llm)
        assert came_from("ssd", generate(llm))
    with open_llm(device, num_blocks=400, **settings, host_cache_bytes="256MiB") as llm:
        assert came_from("ssd", generate(llm))
        forget_device(llm)
        assert came_from("host", generate(llm))  # kept on the way


@pytest.mark.parametrize("device", DEVICES)
def test_from_the_disk_after_a_kill(device, tmp_path):
    settings = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "512MiB", "num_blocks": 400}
    killed = run_worker({**settings, "device": device}, kill=True)
    check([answer["ids"] for answer in killed])
    with open_llm(device, **settings) as llm:
        assert came_from("ssd", generate(llm))


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_into_host_memory(device):
    """A pool that holds one prompt and little else: sequences go and come back all the time."""
    many = [i for i, prompt in enumerate(PROMPTS) if 28 <= len(prompt["ids"]) <= 60]
    many = many[: effort(5, 8)]
    settings = {"num_blocks": 8, "max_model_len": 96, "host_cache_bytes": "256MiB"}
    with open_llm(device, **settings) as llm:
        generate(llm, many)
        generate(llm, many)
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["tiers"]["host"]["hit_tokens"] > 0


@pytest.mark.parametrize("store", effort(["redis"], ["redis", "mooncake", "file"]))
def test_from_another_process_through_a_remote_store(store, tmp_path):
    """One process computes, and another finds all of it."""
    with remote_store(store, tmp_path) as url:
        settings = {"remote_cache_url": url, "num_blocks": 400, "device": "cpu"}
        with open_llm(**settings) as llm:
            assert "remote" not in generate(llm)
            assert llm.engine.scheduler.tiering.store.flush(PATIENCE_S)
        found = run_worker(settings)
    check([answer["ids"] for answer in found])
    total: Counter[str] = Counter()
    for answer in found:
        total.update(answer["from"])
    assert came_from("remote", total)


@contextmanager
def remote_store(kind, folder):
    """A real one, for as long as it is needed."""
    if kind == "file":
        yield f"file://{folder}?compress=zstd"
        return
    if kind == "redis":
        from redis_server import RedisServer

        server = RedisServer(folder)
        try:
            yield f"unix://{server.socket}"
        finally:
            server.kill()
        return
    from mooncake_server import MooncakeMaster

    from quire.kv.tiers.remote.address import Address
    from quire.kv.tiers.remote.mooncake.client import MooncakeClient
    from quire.kv.tiers.remote.mooncake.url import setup_of
    from quire.kv.tiers.remote.tier import value_shape

    master = MooncakeMaster()
    shape = value_shape(image_bytes=4096, block_size=16)
    lender = MooncakeClient(setup_of(Address.parse(f"{master.url}?segment=256MiB")), shape, 5.0)
    lender.connect()
    try:
        yield master.url
    finally:
        lender.close()
        master.kill()


def run_worker(settings, which=LONG, kill=False):
    job = {"settings": settings, "prompts": which, "tokens": TOKENS, "kill": kill}
    done = subprocess.run(
        [sys.executable, str(HERE / "tier_worker.py"), json.dumps(job)],
        stdout=subprocess.PIPE,
        timeout=5 * PATIENCE_S,
    )
    assert done.returncode == (-9 if kill else 0)
    found = json.loads(done.stdout)
    assert found["flushed"]
    return found["answers"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ssd_cache_dir": "x"}, "needs both ssd_cache_dir and ssd_cache_bytes"),
        ({"ssd_cache_bytes": "1GiB"}, "needs both ssd_cache_dir and ssd_cache_bytes"),
        ({"host_cache_bytes": 1000}, "holds no block"),
        ({"host_cache_bytes": "900TiB"}, "is more than the .* that are free"),
        ({"host_cache_bytes": "1GiB", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"remote_cache_url": "carrier-pigeon://x"}, "carrier-pigeon"),
        ({"tenant_cache_share": 0.5}, "set host_cache_bytes or ssd_cache_dir"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        open_llm("cpu", num_blocks=8, load_format="dummy", **settings)
