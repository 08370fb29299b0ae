"""Through the server: a tenant that floods the tiers leaves the others' blocks where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

from quire.kv.tiers.ssd.geometry import INDEX_FILE, Geometry
from quire.kv.tiers.ssd.index_file import IndexFile

IMAGE_BYTES = 8192  # of the tiny model's blocks: whole pages, so that a slot takes no more
SLOTS = 64
MINE = [*range(1000, 1161)]  # ten blocks, and the token that is always computed


@contextmanager
def serving(tiny: str, keys: Path, *flags: str) -> Iterator[ServerProcess]:
    """With a pool that holds a few prompts."""
    server = ServerProcess.tiny(tiny, "--num-blocks", "48", "--api-keys-file", str(keys), *flags)
    try:
        yield server
    finally:
        assert server.stop() == 0, server.log


def ask(server: ServerProcess, key: str, prompt: list[int], salt: str = "") -> int:
    """How many tokens were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def flood(server: ServerProcess, *keys: str) -> None:
    """Prompts that were not asked before, in namespaces that were not used before."""
    for number in range(16):
        prompt = [2000 + number, *range(3000, 3176)]
        ask(server, keys[number % len(keys)], prompt, salt=f"salt {number % 7}")


def hits(server: ServerProcess, tier: str) -> float:
    with server.http() as http:
        text = http.get("/metrics").text
    samples = [sample for each in text_string_to_metric_families(text) for sample in each.samples]
    [found] = [
        sample.value
        for sample in samples
        if sample.name == "quire_hit_tokens_total" and sample.labels["tier"] == tier
    ]
    return float(found)


def held_on_disk(folder: Path) -> list[int]:
    """How many blocks each tenant has, the most first."""
    with open(folder / INDEX_FILE, "rb") as index:
        tenants = IndexFile(index.fileno()).read().tenants()
    return [count for _, count in Counter(tenants).most_common()]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("sk-me\nsk-one crowd\nsk-two crowd\n")
    return file


@pytest.mark.parametrize(("share", "found"), [("0.5", 160), ("1", 0)])
def test_a_flood_ends_at_its_share_of_host_memory(tiny, keys, share, found):
    """Keys of one group share one quota. Without quotas the flood takes everything."""
    room = str(SLOTS * IMAGE_BYTES)
    flags = ["--host-cache-bytes", room, "--tenant-cache-share", share]
    with serving(tiny, keys, *flags) as server:
        assert ask(server, "sk-me", MINE) == 0
        flood(server, "sk-one", "sk-two")
        assert ask(server, "sk-me", MINE) == hits(server, "host") == found
        assert hits(server, "device") == 0, "else the pool alone would have kept them"


def test_and_of_the_disk_also_after_a_restart_with_a_smaller_one(tiny, keys, tmp_path):
    folder = tmp_path / "ssd"
    room = str(Geometry(IMAGE_BYTES, BLOCK_SIZE).quota_for(SLOTS))
    disk = ["--ssd-cache-dir", str(folder), "--ssd-cache-bytes", room]
    with serving(tiny, keys, *disk, "--tenant-cache-share", "0.5") as server:
        assert ask(server, "sk-me", MINE) == 0
        flood(server, "sk-one", "sk-two")
    assert held_on_disk(folder) == [32, 10]
    with serving(tiny, keys, *disk, "--tenant-cache-share", "0.25") as server:
        assert held_on_disk(folder) == [16, 10]
        assert ask(server, "sk-me", MINE) == hits(server, "ssd") == 160
        flood(server, "sk-two")
    assert held_on_disk(folder) == [16, 10]
