"""Quire on Ray Serve, and parts of it killed. The tests go in order; each leaves it whole."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray_service import Load, RayService, kill, ray_service
from redis_server import RedisServer
from tiny_model import write_tiny_model

from quire import LLM, SamplingParams
from quire.errors import ConfigError

PROMPTS = [
    f"Chapter {i}. The keeper of the lighthouse wrote: " + f"{i} waves. " * 60 for i in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """What one engine answers."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(model), load_format="dummy", device="cpu", num_blocks=1024) as llm:
        outs = llm.generate(PROMPTS, params)
    return {prompt: out.outputs[0].text for prompt, out in zip(PROMPTS, outs, strict=True)}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.kill()


@pytest.fixture(scope="module")
def service(model: Path, expected: dict[str, str], redis: RedisServer) -> Iterator[RayService]:
    with ray_service(model, 2, remote_cache_url=redis.url) as service:
        yield service


def check(load: Load, expected: dict[str, str]) -> None:
    assert load.answers
    wrong = [(prompt, text) for prompt, text in load.answers if text != expected[prompt]]
    assert not wrong


def test_answers_are_those_of_one_engine(service: RayService, expected: dict[str, str]) -> None:
    for prompt in PROMPTS:
        assert service.complete(prompt)["choices"][0]["text"] == expected[prompt]
    together = service.complete(PROMPTS)["choices"]  # a dozen requests in one
    assert [each["text"] for each in together] == [expected[prompt] for prompt in PROMPTS]
    assert len(service.complete(PROMPTS[0], n=3, temperature=1, seed=1)["choices"]) == 3


def test_a_stream(service: RayService, expected: dict[str, str]) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    with service.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert len(texts) > 2 and "".join(texts) == expected[PROMPTS[0]]


def test_the_same_api_and_page(service: RayService) -> None:
    assert service.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert service.http.get("/ready").status_code == 200
    assert "<html" in service.http.get("/").text
    metrics = service.http.get("/metrics").text
    assert 'engine="0"' in metrics and 'engine="1"' in metrics
    assert (
        service.http.post("/v1/completions", json={"model": "other", "prompt": "x"}).status_code
        == 404
    )
    assert service.http.post("/v1/completions", json={"prompt": "", "n": 0}).status_code == 400


def test_a_prompt_goes_where_its_prefix_is(service: RayService) -> None:
    """Every follower finds all full blocks of the first, however the first was placed."""
    for i in range(6):
        prefix = f"Log {i}: " + "calm sea, light wind. " * 20
        first = service.complete(prefix + "Who?")["usage"]
        follower = service.complete(prefix + "When?")["usage"]
        shared = first["prompt_tokens"] // 16 * 16 - 16
        assert follower["prompt_tokens_details"]["cached_tokens"] >= shared
    assert all(each["computed"] > 0 for each in service.replicas())


def test_what_one_computed_another_loads(service: RayService, redis: RedisServer) -> None:
    """And a request that comes when both have just died waits for the next."""
    logs = [f"The log of ship {i}: " + "wind from the west, sails reefed. " * 20 for i in range(6)]
    before = redis.plain.dbsize()
    texts = [service.complete(log)["choices"][0]["text"] for log in logs]
    service.until(lambda: redis.plain.dbsize() >= before + 6 * 8)
    pids = service.pids("Replica")
    for pid in pids:
        kill(pid)
    answers = [service.complete(log) for log in logs]
    assert [answer["choices"][0]["text"] for answer in answers] == texts
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert sum(each["cached_tokens_by_tier"].get("remote", 0) for each in details) > 0
    service.until(lambda: not set(pids) & set(service.pids("Replica")))
    service.until(lambda: service.is_whole(2))


def test_a_client_that_leaves_is_not_computed_for(service: RayService) -> None:
    body = {
        "model": "tiny",
        "prompt": "Once",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with service.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert sum(each["open"] for each in service.replicas()) == 1
    service.until(lambda: sum(each["open"] for each in service.replicas()) == 0)
    service.until(lambda: all(each["blocks"]["in_use"] == 0 for each in service.replicas()))


@pytest.mark.parametrize("who", ["replica", "engine", "ingress", "controller"])
def test_killed_under_load(service: RayService, expected: dict[str, str], who: str) -> None:
    """Errors are bounded, nothing hangs, it comes back by itself, and no answer is wrong."""
    service.until(lambda: service.is_whole(2))
    ingress = service.pids("Ingress")
    with Load(service, PROMPTS) as load:
        service.until(lambda: len(load.answers) >= 20)
        if who == "replica":
            kill(service.pids("Replica")[0])
        elif who == "engine":
            kill(service.engines()[0])
        elif who == "ingress":
            kill(ingress[0])
        else:
            service.kill_controller()
        before = len(load.answers)
        service.until(lambda: len(load.answers) >= before + 50)
        service.until(lambda: service.is_whole(2))
        whole = len(load.answers)
        service.until(lambda: len(load.answers) >= whole + 20)
    check(load, expected)
    most = (
        8 if who == "ingress" else 0
    )  # what was open there, and the client sees its connection end
    assert len(load.failures) <= most, load.failures


def test_a_stream_whose_replica_dies_ends_with_an_error(service: RayService) -> None:
    service.until(lambda: service.is_whole(2))
    body = {
        "model": "tiny",
        "prompt": "Once",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    pids = service.pids("Replica")
    with service.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in pids:
            kill(pid)
        *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
    service.until(lambda: not set(pids) & set(service.pids("Replica")))
    service.until(lambda: service.is_whole(2))


def test_a_rolling_restart_loses_nothing(service: RayService, expected: dict[str, str]) -> None:
    before = service.pids("Replica")
    with Load(service, PROMPTS, threads=4) as load:
        service.until(lambda: len(load.answers) >= 10)
        deploying = threading.Thread(target=service.run, kwargs={"num_replicas": 2, "seed": 1})
        deploying.start()
        service.until(lambda: not set(before) & set(service.pids("Replica")))
        deploying.join()
        service.until(lambda: service.is_whole(2))
    check(load, expected)
    assert not load.failures


def test_another_model_takes_over(
    service: RayService, expected: dict[str, str], tmp_path: Path, smollm2_path: Path
) -> None:
    """While both are there, no request of one goes to the other's engine."""
    wider = write_tiny_model(tmp_path / "wider", smollm2_path)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(wider), load_format="dummy", device="cpu", num_blocks=1024) as llm:
        outs = llm.generate(PROMPTS, params)
    others = {prompt: out.outputs[0].text for prompt, out in zip(PROMPTS, outs, strict=True)}
    assert all(others[prompt] != expected[prompt] for prompt in PROMPTS)
    with Load(service, PROMPTS, threads=4) as load:
        service.until(lambda: len(load.answers) >= 10)
        first, service.model = service.model, wider
        service.run(num_replicas=2)
        service.until(lambda: service.is_whole(2))
        before = len(load.answers)
        service.until(lambda: len(load.answers) >= before + 20)
    service.model = first
    service.run(num_replicas=2)
    service.until(lambda: service.is_whole(2))
    assert all(text in (expected[prompt], others[prompt]) for prompt, text in load.answers)
    assert all(text == others[prompt] for prompt, text in load.answers[-8:])
    assert len(load.failures) <= 4  # those that the first server had, when its replicas were gone


def test_more_replicas_under_load_and_fewer_after(
    service: RayService, expected: dict[str, str]
) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 2}
    service.run(autoscaling_config=scaling)
    service.until(lambda: service.is_whole(1))
    with Load(service, PROMPTS, threads=8) as load:
        service.until(lambda: service.is_whole(2))
    service.until(lambda: service.is_whole(1))
    check(load, expected)
    assert not load.failures


def test_settings_that_are_not_for_ray() -> None:
    from quire.serve import deployment

    with pytest.raises(ConfigError, match=r"port is not a setting on Ray: serve\.start"):
        deployment(port=8000)
    with pytest.raises(ConfigError, match="not both"):
        deployment(num_replicas=2, autoscaling_config={})
    with pytest.raises(ConfigError, match="block_size"):
        deployment(blok_size=16)
