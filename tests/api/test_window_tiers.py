"""Models with windows over the lower tiers: the same answers wherever a prefix comes from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from redis_server import RedisServer
from tiny_ranks import open_ranks, write_weights

from quire import LLM, SamplingParams
from quire.kv.rates import Rates
from quire.kv.tiers.ssd.inspector import verify
from quire.ranks import rank_model

WINDOW = 24
FAMILIES = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "qwen2": {  # two layers see all, three a window: two groups of two layers, and one of one
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
}
GROUPS = {"mistral": (WINDOW,), "qwen2": (None, WINDOW, WINDOW)}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
HOST = {"host_cache_bytes": 64 << 20}

Answers = list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 5, "max_position_embeddings": 512}
    return write_weights(tmp_path_factory.mktemp(family), **FAMILIES[family] | shape)


def prompts() -> Answers:
    """Several windows long; some go on where others end, and some leave them inside a window."""
    dice = random.Random(0)
    long = [dice.randrange(3, 199) for _ in range(150)]
    tail = [dice.randrange(3, 199) for _ in range(30)]
    return [long, long[:97] + tail, long[:90] + tail, [*long, *tail], long[:20], tail * 3]


def generate(llm: LLM) -> tuple[Answers, dict[str, int]]:
    """The answers, and how many of the prompts' tokens came from where."""
    outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
    found: dict[str, int] = {}
    for output in outputs:
        assert sum(output.cached_tokens_by_tier.values()) == output.num_cached_tokens
        for tier, count in output.cached_tokens_by_tier.items():
            found[tier] = found.get(tier, 0) + count
    return [output.outputs[0].token_ids for output in outputs], found


def forget_device(llm: LLM) -> None:
    assert llm.engine.scheduler.tiering.store.flush(60)
    llm.reset_prefix_cache(device_only=True)


def open_llm(family: str, folder: Path, size: int = 1, **settings: Any) -> LLM:
    llm = open_ranks(folder, size, **{"num_blocks": 400} | settings)
    assert llm.engine.runner.cache.layout.windows == GROUPS[family]
    return llm


@pytest.fixture(scope="module")
def right(folder: Path) -> Answers:
    """Of one group that keeps all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_model, "WINDOW_GROUPS", False)
        with open_ranks(folder, 1, num_blocks=400) as llm:
            assert llm.engine.runner.cache.layout.windows == (None,)
            return generate(llm)[0]


def test_cold_from_the_device_and_from_host_memory(
    family: str, folder: Path, right: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine some is found to be computed faster than loaded.
    monkeypatch.setattr(Rates, "seconds_for", lambda *_: None)
    with open_llm(family, folder, **HOST) as llm:
        llm.engine.overlap = True  # as on a GPU
        assert generate(llm)[0] == right
        again, found = generate(llm)
        assert again == right and found.keys() == {"device"}
        forget_device(llm)
        restored, found = generate(llm)
        assert restored == right and found["host"] >= 144 + 5 * 24


def test_tiny_pools_that_push_each_other_out(family: str, folder: Path, right: Answers) -> None:
    room = {"num_blocks": 34 * len(GROUPS[family]), "max_num_batched_tokens": 32}
    with open_llm(family, folder, max_num_seqs=4, **room, **HOST) as llm:
        for _ in range(2):
            assert generate(llm)[0] == right
        assert llm.stats()["blocks"]["evicted"] > 20


def test_two_ranks_share_their_tiers(family: str, folder: Path, right: Answers) -> None:
    if len(GROUPS[family]) == 1:
        pytest.skip("the shards of several groups are the ones to mix up")
    with open_llm(family, folder, size=2, **HOST) as llm:
        assert generate(llm)[0] == right
        forget_device(llm)
        restored, found = generate(llm)
        assert restored == right and found["host"] > 0


def test_from_the_disk_after_a_restart(
    family: str, folder: Path, right: Answers, tmp_path: Path
) -> None:
    disk = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": 64 << 20}
    with open_llm(family, folder, **disk) as llm:
        assert generate(llm)[0] == right
    held = verify(tmp_path, lambda count: lambda: None)
    assert held["whole"] == held.total() > 0
    with open_llm(family, folder, **disk) as llm:
        restored, found = generate(llm)
        assert restored == right and found["ssd"] >= 144


def test_from_redis(family: str, folder: Path, right: Answers, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        for is_second in (False, True):
            with open_llm(family, folder, remote_cache_url=f"unix://{server.socket}") as llm:
                eventually(lambda llm=llm: is_connected(llm), "the remote cache is not used")
                answered, found = generate(llm)
                assert answered == right
                assert (found.get("remote", 0) >= 144) == is_second
                assert llm.engine.scheduler.tiering.store.flush(60)
    finally:
        server.kill()


def is_connected(llm: LLM) -> bool:
    return llm.stats()["tiers"]["remote"]["breaker"] == "closed"


def restored_bytes(folder: Path) -> tuple[list[int], int]:
    """The answer to a long prompt that comes from host memory, and what was copied for it."""
    prompt = prompts()[3]
    with open_ranks(folder, 1, num_blocks=400, **HOST) as llm:
        for _ in range(2):
            [output] = llm.generate([prompt], PARAMS, use_tqdm=False)
            forget_device(llm)
        assert output.cached_tokens_by_tier == {"host": 176}
        moved = llm.stats()["tiers"]["host"]["reads"]["bytes"]
    return output.outputs[0].token_ids, moved


def test_a_restore_moves_what_the_windows_need(family: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_model, "WINDOW_GROUPS", False)
        answer, whole = restored_bytes(folder)
    again, moved = restored_bytes(folder)
    assert again == answer
    # 22 blocks are 176 tokens, and three of them are what a window needs.
    full = 0 if family == "mistral" else 2
    assert moved * 5 * 22 == whole * (full * 22 + (5 - full) * 3)
