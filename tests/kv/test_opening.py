"""`quire.kv.open_store`: the tiers that are asked for, and one sentence for what cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import quire.kv
from quire.errors import ConfigError
from quire.kv import ImagePool, Namespace, open_store

BLOCK_BYTES = 5000
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host_cache_bytes": 4096}, "holds no block, which takes 8,192 bytes"),
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
