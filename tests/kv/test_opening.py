"""`quire.kv.open_store`: the tiers that are asked for, and one sentence for what cannot be."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest
import torch
from patience import PATIENCE_S

import quire.kv
from quire.errors import ConfigError
from quire.kv import ImagePool, Namespace, open_store
from quire.kv.tiers.ssd.geometry import Geometry

BLOCK_BYTES = 5000
GEOMETRY = Geometry(BLOCK_BYTES, 16)
NAMESPACE = Namespace("model", "float32", "float32", 16, "1", "none")


def pool():
    return ImagePool(torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8))


def test_host_memory_alone():
    store = open_store(pool(), NAMESPACE, host_cache_bytes=3 * 8192 + 1)
    assert store.tiers == [] and store.host.capacity == 3
    store.close()


def test_a_disk_in_the_folders_of_a_setting(tmp_path):
    folders = f"{tmp_path / 'a'}, {tmp_path / 'b'}"
    store = open_store(pool(), NAMESPACE, ssd_cache_dir=folders, ssd_cache_bytes=1 << 20)
    assert [tier.name for tier in store.tiers] == ["ssd"]
    assert (tmp_path / "a").is_dir() and (tmp_path / "b").is_dir()
    store.close()


def test_each_salt_has_its_share_of_every_tier(tmp_path):
    blocks = pool()
    with closing(
        open_store(
            blocks,
            NAMESPACE,
            host_cache_bytes=8 * 8192,
            ssd_cache_dir=str(tmp_path),
            ssd_cache_bytes=GEOMETRY.quota_for(8),
            tenant_cache_share=0.5,
        )
    ) as store:
        mine = list(range(48))
        assert store.put(mine, [0, 1, 2], salt="mine").wait(PATIENCE_S)
        for first in range(100, 110):
            tokens = [first] * 48
            assert store.put(tokens, [0, 1, 2], salt="flood").wait(PATIENCE_S)
        assert store.flush(PATIENCE_S)
        match = store.match(mine, salt="mine")
        assert match.ready() and match.places == ["host"] * 3
        match.drop()
        assert [each["used"] for each in store.stats().values()] == [7, 7]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host_cache_bytes": 4096}, "holds no block, which takes 8,192 bytes"),
        ({"host_cache_bytes": "900TiB"}, "more than the .* bytes of memory that are free"),
        (
            {"host_cache_bytes": 3 * 8192, "tenant_cache_share": 0.3},
            r"tenant_cache_share=0\.3 of host_cache_bytes, 3 blocks, holds no block; raise either",
        ),
        ({"ssd_cache_dir": "x"}, "needs both"),
        ({"ssd_cache_bytes": 1 << 20}, "needs both"),
        ({"remote_cache_url": "carrier-pigeon://x"}, "carrier-pigeon"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        open_store(pool(), NAMESPACE, **settings)


def test_a_store_that_cannot_be_opened_leaves_no_folder_locked(tmp_path):
    disk = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": 1 << 20}
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        open_store(pool(), NAMESPACE, **disk, remote_cache_url="carrier-pigeon://x")
    open_store(pool(), NAMESPACE, **disk).close()


@pytest.mark.parametrize("name", quire.kv.__all__)
def test_every_public_name_can_be_had(name):
    assert getattr(quire.kv, name) is not None
    assert name in dir(quire.kv)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Store'"):
        _ = quire.kv.Store


def test_to_import_it_costs_nothing_before_a_name_is_used():
    code = "import sys, quire.kv; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
