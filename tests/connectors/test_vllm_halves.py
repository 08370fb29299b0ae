"""The vLLM connector's halves, over sockets and real tiers, without vLLM."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE_S
from plain_vllm import BLOCK, Engine, Request

from quire.connectors.vllm import worker_half
from quire.connectors.vllm.cache_views import describe, layer_pool
from quire.connectors.vllm.lookup import LookupClient, socket_path
from quire.connectors.vllm.naming import Prompts, folder_digest, model_digest
from quire.connectors.vllm.settings import Settings
from quire.errors import ConfigError
from quire.kv.pools.block_pool import Transfer
from quire.kv.tiers.ssd.geometry import DATA_FILE

PROMPT = list(range(100, 100 + 4 * BLOCK + 1))


def adapter(folder: Path, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_path=str(folder), lora_int_id=number, load_inplace=False)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    assert engine.worker.store.flush(PATIENCE_S)
    assert not engine.worker.store.host.stats()["held"]
    engine.close()


def test_another_request_loads_what_one_has_computed(engine: Engine) -> None:
    (computed,) = engine.compute(Request("a", PROMPT))
    (loaded,) = engine.load(Request("b", PROMPT))
    assert torch.equal(engine.values(loaded[:4]), engine.values(computed[:4]))
    assert not engine.failed
    assert engine.worker.take_counts() == {"saved_blocks": 4, "loaded_blocks": 4}


def test_requests_of_one_step_are_saved_together(engine: Engine) -> None:
    requests = [Request("a", PROMPT), Request("b", PROMPT[1:]), Request("c", PROMPT[:2])]
    tables = [engine.tables_for(request.num_tokens) for request in requests]
    for request, table in zip(requests, tables, strict=True):
        assert engine.find(request) == 0
        engine.scheduler.allocated(request, table, 0)
    engine.step(new=tuple((r, table, 0) for r, table in zip(requests, tables, strict=True)))
    assert [engine.scheduler.ended(request) for request in requests] == [True, True, False]
    for request in requests[:2]:
        engine.wait_for(engine.sent, request)
    for request, (computed,) in zip(requests[:2], tables, strict=False):
        again = Request(f"{request.request_id} again", request.all_token_ids)
        (loaded,) = engine.load(again)
        num_full = (request.num_tokens - 1) // BLOCK  # the last token is always computed
        assert torch.equal(engine.values(loaded[:num_full]), engine.values(computed[:num_full]))


def test_only_what_vllm_has_not_is_loaded(engine: Engine) -> None:
    (computed,) = engine.compute(Request("a", PROMPT))
    before = engine.values(list(range(64)))
    (loaded,) = engine.load(Request("b", PROMPT), computed=2 * BLOCK)
    assert torch.equal(engine.values(loaded[2:4]), engine.values(computed[2:4]))
    assert torch.equal(engine.values(loaded[:2]), before[:, loaded[:2]])


def test_the_last_token_is_always_computed(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    whole = Request("b", PROMPT[: 4 * BLOCK])
    assert engine.find(whole) == 3 * BLOCK
    assert engine.find(whole, computed=3 * BLOCK) == 0


def test_tenants_and_adapters_and_images_are_apart(engine: Engine, tmp_path: Path) -> None:
    folders = []
    for at in range(2):
        folder = tmp_path / f"adapter {at}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes([at]))
        folders.append(adapter(folder, at))
    kinds = [
        {},
        {"cache_salt": "x"},
        {"lora_request": folders[0]},
        {"lora_request": folders[1]},
        {"mm_features": [SimpleNamespace(identifier="cat")]},
        {"mm_features": [SimpleNamespace(identifier="dog")]},
    ]
    for at, kind in enumerate(kinds):
        engine.compute(Request(f"{at}", PROMPT, **kind))  # which finds nothing
        again = Request(f"{at} again", PROMPT, **kind)
        assert engine.find(again) == 4 * BLOCK
        engine.scheduler.allocated(again, [[]], 0)


def test_requests_that_cannot_be_named_are_not_cached(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    no_folder = adapter(Path("no such folder"))
    for at, kind in enumerate([{"prompt_embeds": torch.zeros(1)}, {"lora_request": no_folder}]):
        assert engine.find(Request(f"{at}", PROMPT, **kind)) == 0


def test_prompts_whose_logprobs_are_wanted_are_computed(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    assert engine.find(Request("b", PROMPT, skip_reading_prefix_cache=True)) == 0


def test_an_answer_is_saved_as_it_grows(engine: Engine) -> None:
    request = Request("a", PROMPT[: BLOCK + 1])
    blocks = engine.blocks_for(3 * BLOCK)
    assert engine.find(request) == 0
    engine.scheduler.allocated(request, [blocks], 0)
    engine.step(new=((request, [blocks], 0),))
    for token in PROMPT[BLOCK + 1 : 3 * BLOCK]:
        computed = request.num_tokens
        request.all_token_ids.append(token)
        engine.step(running=((request, computed, 1),))
    assert engine.scheduler.ended(request)
    engine.wait_for(engine.sent, request)
    (loaded,) = engine.load(Request("b", PROMPT[: 3 * BLOCK + 1]))
    assert torch.equal(engine.values(loaded[:3]), engine.values(blocks))


def test_an_answer_behind_a_prompt_that_vllm_has_whole_is_saved(engine: Engine) -> None:
    """The workers are not asked for such a prompt, and name its blocks when the answer has one."""
    (computed,) = engine.compute(Request("a", PROMPT[: 2 * BLOCK]))
    request = Request("b", PROMPT[: 2 * BLOCK])
    assert engine.find(request, computed=BLOCK) == 0
    blocks = [*computed[:1], *engine.blocks_for(3 * BLOCK)]
    engine.scheduler.allocated(request, [blocks], 0)
    engine.step(new=((request, [blocks], BLOCK),))
    for token in PROMPT[2 * BLOCK :]:
        done = request.num_tokens
        request.all_token_ids.append(token)
        engine.step(running=((request, done, 1),))
    assert engine.scheduler.ended(request)
    engine.wait_for(engine.sent, request)
    (loaded,) = engine.load(Request("c", PROMPT))
    assert torch.equal(engine.values(loaded[2:4]), engine.values(blocks[2:4]))


def test_guesses_are_not_saved(engine: Engine) -> None:
    """A step may compute drafts behind the known tokens."""
    request = Request("a", PROMPT[: BLOCK + 1])
    blocks = engine.blocks_for(4 * BLOCK)
    assert engine.find(request) == 0
    engine.scheduler.allocated(request, [blocks], 0)
    engine.step(new=((request, [blocks], 0),))
    engine.step(running=((request, BLOCK + 1, 2 * BLOCK),))
    assert engine.scheduler.ended(request)
    engine.wait_for(engine.sent, request)
    other = Request("b", PROMPT)
    assert engine.find(other) == BLOCK
    engine.scheduler.allocated(other, [[]], 0)


def test_one_that_was_preempted_is_loaded_when_it_resumes(engine: Engine) -> None:
    request = Request("a", PROMPT)
    blocks = engine.blocks_for(request.num_tokens)
    assert engine.find(request) == 0
    engine.scheduler.allocated(request, [blocks], 0)
    engine.step(new=((request, [blocks], 0),))
    wanted = engine.values(blocks[:4])
    engine.step(preempted=("a",))
    for cache in engine.caches.values():
        cache[blocks] = 0  # all of its blocks are given to others
    (loaded,) = engine.load(request)
    assert torch.equal(engine.values(loaded[:4]), wanted)
    engine.step(resumed=((request, [loaded], 4 * BLOCK),))
    assert engine.scheduler.ended(request)
    engine.wait_for(engine.sent, request)


def test_one_whose_token_is_dropped_with_its_blocks_is_saved_on(engine: Engine) -> None:
    """As when vLLM's prefix cache is reset: all blocks were saved, and the last is asked for no
    more, since its last token is computed in any case."""
    request = Request("a", PROMPT[: 4 * BLOCK])
    tables = engine.tables_for(7 * BLOCK)
    assert engine.find(request) == 0
    engine.scheduler.allocated(request, tables, 0)
    engine.step(new=((request, tables, 0),))
    engine.step(preempted=("a",))
    found = engine.find(request)
    assert found == 3 * BLOCK
    engine.scheduler.allocated(request, tables, found)
    engine.step()
    engine.wait_for(engine.received, request)
    engine.step(resumed=((request, tables, found),))
    for token in range(2 * BLOCK):
        computed = request.num_tokens
        request.all_token_ids.append(token)
        engine.step(running=((request, computed, 1),))
    assert engine.scheduler.ended(request)
    engine.wait_for(engine.sent, request)
    (loaded,) = engine.load(Request("b", [*request.all_token_ids, 1]))
    assert torch.equal(engine.values(loaded[:6]), engine.values(tables[0][:6]))


def test_one_that_is_aborted_while_it_loads_is_reported(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    request = Request("b", PROMPT)
    found = engine.find(request)
    engine.scheduler.allocated(request, engine.tables_for(request.num_tokens), found)
    engine.step()
    if "b" not in engine.received:
        assert not engine.scheduler.ended(request)
        engine.wait_for(engine.received, request)
    assert not engine.failed


def test_one_that_is_aborted_before_it_has_blocks_holds_nothing(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT))
    request = Request("b", PROMPT)
    assert engine.find(request) == 4 * BLOCK
    assert not engine.scheduler.ended(request)
    engine.step()


def test_blocks_that_a_disk_has_lost_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    tiers = {"host_cache_bytes": 0, "ssd_cache_dir": str(folder), "ssd_cache_bytes": "8MiB"}
    engine = Engine(tmp_path, **tiers)
    engine.compute(Request("a", PROMPT))
    assert engine.worker.store.flush(PATIENCE_S)
    for file in folder.rglob(DATA_FILE):
        with open(file, "r+b") as data:
            data.write(os.urandom(file.stat().st_size))
    (blocks,) = engine.load(Request("b", PROMPT))
    assert engine.failed == set(blocks[:4])
    assert engine.worker.take_counts()["failed_blocks"] == 4
    engine.close()


def test_a_worker_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    assert LookupClient(tmp_path / "absent").ask({"request": "a"}) is None


def test_sockets_of_engines_are_apart() -> None:
    assert socket_path("one", 0) != socket_path("other", 0)
    assert len(str(socket_path("x" * 400, 12))) < 100


# --- layouts --------------------------------------------------------------------------------------

SHAPES = {
    "kv block token head width": lambda heads: ((2, 8, BLOCK, heads, 6), 1),
    "block kv token head width": lambda heads: ((8, 2, BLOCK, heads, 6), 0),
    "block head token packed": lambda heads: ((8, heads, BLOCK, 12), 0),
    "latents": lambda heads: ((8, BLOCK, 6 * heads), 0),
    "kernel blocks": lambda heads: ((16, heads, BLOCK // 2, 12), 0),
}


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_layout_comes_back_layer_by_layer(kind: str, heads: int) -> None:
    shape, dim = SHAPES[kind](heads)
    physical = [torch.randn(shape).transpose(-2, -3).contiguous().transpose(-2, -3)] * 1
    physical += [torch.randn(shape)]  # another order of bytes for the same values
    caches = {f"{at}": tensor for at, tensor in enumerate(physical)}
    dims = dict.fromkeys(caches, dim)
    pool = layer_pool(caches, dims, 8, [list(caches)])
    images = torch.zeros(3, pool.block_bytes, dtype=torch.uint8)
    pool.to_host([5, 0, 3], images, [0, 1, 2]).wait()
    ratio = shape[dim] // 8
    by_block = [t.movedim(dim, 0).unflatten(0, (8, ratio)).clone() for t in physical]
    for tensor in physical:
        tensor.fill_(float("nan"))
    pool.from_host(images, [0, 1, 2], [1, 2, 7]).wait()
    for wanted, tensor in zip(by_block, physical, strict=True):
        loaded = tensor.movedim(dim, 0).unflatten(0, (8, ratio))
        assert torch.equal(loaded[[1, 2, 7]], wanted[[5, 0, 3]])
        assert loaded[[0, 3, 4, 5, 6]].isnan().all()


def test_layers_that_share_their_kv_are_one() -> None:
    shared = torch.randn(8, 2, BLOCK, 12)
    caches = {"a": shared, "b": torch.randn(8, 2, BLOCK, 12), "c": shared}
    pool = layer_pool(caches, dict.fromkeys(caches, 0), 8, [list(caches)])
    assert pool.block_bytes == 2 * shared[0].nbytes


def test_a_layout_that_is_none() -> None:
    with pytest.raises(ConfigError, match="does not know this layout"):
        layer_pool({"a": torch.zeros(9, 2, BLOCK, 12)}, {"a": 0}, 8, [["a"]])


def test_layouts_of_one_shape_have_different_names() -> None:
    caches = {"a": torch.zeros(2, 2, BLOCK, 2, 6)}
    assert describe(caches, {"a": 0}, [["a"]]) != describe(caches, {"a": 1}, [["a"]])


# --- names and settings -------------------------------------------------------------------------


def test_a_model_is_named_after_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    (tmp_path / "README.md").write_text("of no matter")
    before = model_digest(str(tmp_path), None, "")
    (tmp_path / "README.md").write_text("changed")
    assert model_digest(str(tmp_path), None, "") == before == folder_digest(tmp_path, "vllm model")
    weights.write_bytes(b"two")
    assert model_digest(str(tmp_path), None, "") != before


def test_a_model_without_a_folder_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="give model_name"):
        model_digest("no such/model", None, "")
    assert model_digest("no such/model", None, "mine") == "named mine"


def test_a_folder_without_weights_does_not_name_a_model(tmp_path: Path) -> None:
    """Where weights come from elsewhere, as from a bucket, fine-tunes have one configuration."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="give model_name"):
        model_digest(str(tmp_path), None, "")


def test_revisions_of_a_model_have_different_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--its--model"
    for name, commit in (("main", "1" * 40), ("tuned", "2" * 40)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_text(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    digests = [model_digest("its/model", which, "") for which in (None, "main", "tuned", "2" * 40)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean host_cache_bytes"):
        Settings.create({"host_cache_byte": 1})
    with pytest.raises(ConfigError, match="A size is bytes"):
        Settings.create({"host_cache_bytes": "many"}).tiers_of(0, 1)
    made = Settings.create(
        {"host_cache_bytes": "1MiB", "ssd_cache_dir": "/a, /b", "ssd_cache_bytes": 8}
    )
    tiers = made.tiers_of(1, 2)
    assert tiers["host_cache_bytes"] == 1 << 19
    assert tiers["ssd_cache_dir"] == "/a/worker-1,/b/worker-1"
    assert tiers["ssd_cache_bytes"] == 4


def test_an_adapter_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    lora = adapter(tmp_path)
    first = prompts.of(Request("a", PROMPT, lora_request=lora))
    monkeypatch.setattr(
        "quire.connectors.vllm.naming.folder_digest", lambda folder, kind: pytest.fail("read again")
    )
    assert prompts.of(Request("b", PROMPT, lora_request=lora)) == first


def test_an_adapter_that_is_loaded_again_is_read_again(tmp_path: Path) -> None:
    prompts = Prompts()
    weights = tmp_path / "adapter_model.safetensors"
    found = []
    for number, content in enumerate((b"one", b"two")):
        weights.write_bytes(content)
        found.append(prompts.of(Request("a", PROMPT, lora_request=adapter(tmp_path, number))))
    assert found[0] != found[1]


def test_the_last_blocks_of_a_load_are_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on their way from host memory, and the device has them before what vLLM does next:
    here, whose device is the host, they are there when their copy has begun."""
    (computed,) = engine.compute(Request("a", PROMPT))
    may_land = threading.Event()
    wait = Transfer.wait
    monkeypatch.setattr(Transfer, "wait", lambda self: (may_land.wait(PATIENCE_S), wait(self)))
    (loaded,) = engine.load(Request("b", PROMPT))
    assert torch.equal(engine.values(loaded[:4]), engine.values(computed[:4]))
    assert engine.worker.take_counts()["loaded_blocks"] == 4
    assert engine.worker.store.host.stats()["held"]
    may_land.set()


def test_a_load_with_more_to_come_is_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.compute(Request("a", PROMPT))
    image_bytes = engine.worker.store.host.image_bytes
    monkeypatch.setattr(worker_half, "LAST_BYTES", 3 * image_bytes)
    may_land = threading.Event()
    wait = Transfer.wait
    monkeypatch.setattr(Transfer, "wait", lambda self: (may_land.wait(PATIENCE_S), wait(self)))
    request = Request("b", PROMPT)
    tables = engine.tables_for(request.num_tokens)
    engine.scheduler.allocated(request, tables, engine.find(request))
    for _ in range(20):
        engine.step()
        time.sleep(0.01)
    assert not engine.received
    may_land.set()
    engine.wait_for(engine.received, request)
