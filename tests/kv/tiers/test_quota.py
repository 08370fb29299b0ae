"""The quota is hard: over data, index and headers, over restarts, before the first write."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys, same

from quire.errors import ConfigError
from quire.kv.tiers.ssd import files
from quire.kv.tiers.ssd import open_folder as opening
from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 50_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)


def open_tier(folder: Path, quota: int) -> SsdTier:
    return SsdTier([folder], quota, IMAGE_BYTES, BLOCK_SIZE)


def usage(folder: Path) -> int:
    """What the folder takes on disk, in whichever way it is counted."""
    found = [path.stat() for path in folder.iterdir()]
    return max(sum(each.st_size for each in found), sum(512 * each.st_blocks for each in found))


def fill(tier: SsdTier, prompts: int) -> None:
    for salt in range(prompts):
        tier.write(chain(4, salt), filled(4, IMAGE_BYTES, seed=salt))


def held_prompts(tier: SsdTier, prompts: int) -> list[int]:
    """Those of which every block is there, and right."""
    found = []
    for salt in range(prompts):
        names, images = chain(4, salt), empty(4, IMAGE_BYTES)
        if all(tier.contains(keys(names))):
            assert all(tier.read(names, images))
            assert same(images, filled(4, IMAGE_BYTES, seed=salt), IMAGE_BYTES)
            found.append(salt)
    return found


@pytest.mark.parametrize("quota", [10**6, 1_234_567, 3_000_000, GEOMETRY.quota_for(1)])
def test_it_is_never_passed(tmp_path: Path, quota: int) -> None:
    tier = open_tier(tmp_path, quota)
    slots = tier.stats()["slots"]
    assert slots >= 1 and quota - usage(tmp_path) < 2 * GEOMETRY.slot_bytes
    for salt in range(20):
        tier.write(chain(4, salt), filled(4, IMAGE_BYTES, seed=salt))
        assert usage(tmp_path) <= quota
    told = tier.stats()
    assert told["used"] == slots
    assert told["bytes_on_disk"] <= told["quota_bytes"] == quota
    tier.close()


def test_a_quota_for_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no block; give at least [0-9,]+\.$"):
        open_tier(tmp_path / "new", 60_000)
    assert not (tmp_path / "new").exists()


FILLER = """
import sys
from pathlib import Path
from block_images import BLOCK_SIZE, chain, filled
from quire.kv.tiers.ssd.tier import SsdTier

tier = SsdTier([Path(sys.argv[1])], int(sys.argv[2]), 50_000, BLOCK_SIZE)
for salt in range(10):
    tier.write(chain(4, salt), filled(4, 50_000, seed=salt))
print("full", flush=True)
sys.stdin.read()
"""


def test_fill_kill_9_restart_with_a_smaller_one(tmp_path: Path) -> None:
    large, small = GEOMETRY.quota_for(40), GEOMETRY.quota_for(16)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    writer = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(tmp_path), str(large)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"full\n"
    assert small < usage(tmp_path) <= large
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    tier = open_tier(tmp_path, small)
    assert usage(tmp_path) <= small  # and nothing has been written yet
    assert held_prompts(tier, 10) == [6, 7, 8, 9]  # those that were used last
    assert not tier.counters.drops
    tier.close()


def test_what_was_used_last_survives_a_smaller_one(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, GEOMETRY.quota_for(24))
    fill(tier, 6)
    for salt in (1, 4):
        tier.use(keys(chain(4, salt)))
    tier.close()
    small = GEOMETRY.quota_for(8)
    tier = open_tier(tmp_path, small)
    assert usage(tmp_path) <= small
    assert held_prompts(tier, 6) == [1, 4]
    tier.close()
    tier = open_tier(tmp_path, small)  # they were not only moved, but noted where
    assert held_prompts(tier, 6) == [1, 4]
    tier.write(chain(4, 7), filled(4, IMAGE_BYTES, seed=7))
    assert held_prompts(tier, 8) == [4, 7]  # the order of use has survived as well
    tier.close()


def test_a_larger_one_keeps_everything_and_has_room(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, GEOMETRY.quota_for(8))
    fill(tier, 2)
    tier.close()
    large = GEOMETRY.quota_for(16)
    tier = open_tier(tmp_path, large)
    fill(tier, 4)
    assert held_prompts(tier, 4) == [0, 1, 2, 3]
    assert tier.stats()["evicted"] == 0 and usage(tmp_path) <= large
    tier.close()


def test_packing_does_not_keep_a_start_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path, GEOMETRY.quota_for(16))
    fill(tier, 4)
    tier.close()
    monkeypatch.setattr(opening, "MOVING_SECONDS", -1.0)
    tier = open_tier(tmp_path, GEOMETRY.quota_for(8))
    assert usage(tmp_path) <= GEOMETRY.quota_for(8)
    assert held_prompts(tier, 4) == []  # the recent ones were high up, the others had to go
    fill(tier, 2)
    assert held_prompts(tier, 2) == [0, 1]
    tier.close()


def test_blocks_for_other_images_are_replaced_within_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quota = GEOMETRY.quota_for(8)
    tier = open_tier(tmp_path, quota)
    fill(tier, 2)
    tier.close()
    other = SsdTier([tmp_path], quota, 20_000, BLOCK_SIZE)
    assert f"made for blocks of {BLOCK_SIZE} tokens and 50,000 bytes; it is replaced" in caplog.text
    assert usage(tmp_path) <= quota
    assert other.stats()["used"] == 0
    assert all(other.write(chain(4), filled(4, 20_000)))
    other.close()


def test_a_disk_with_less_room_gets_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In steps, so that a cache that is too large does not take the last of it."""
    allocate = files.allocate

    def small_disk(fd: int, start: int, end: int) -> None:
        if end > 5 * GEOMETRY.slot_bytes:
            raise OSError(errno.ENOSPC, "injected")
        allocate(fd, start, end)

    monkeypatch.setattr(files, "allocate", small_disk)
    monkeypatch.setattr(files, "RESERVE_STEP", 2 * GEOMETRY.slot_bytes)
    tier = open_tier(tmp_path, GEOMETRY.quota_for(16))
    assert tier.stats()["slots"] == 4
    assert (tmp_path / DATA_FILE).stat().st_size == 4 * GEOMETRY.slot_bytes
    fill(tier, 1)
    assert held_prompts(tier, 1) == [0]
    tier.close()


def test_a_disk_is_not_filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither by images, nor by an index for all that a quota allows."""
    found = os.statvfs(tmp_path)
    free = GEOMETRY.quota_for(40)

    def nearly_full(fd: int) -> os.statvfs_result:
        fields = list(found)
        fields[4] = (free - usage(tmp_path)) // found.f_frsize  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    for _ in range(2):  # what it has already is not in the way
        tier = open_tier(tmp_path, 10**15)
        assert 36 <= tier.stats()["slots"] <= 38
        assert usage(tmp_path) <= GEOMETRY.quota_for(38)
        fill(tier, 3)
        assert held_prompts(tier, 3) == [0, 1, 2]
        tier.close()


def test_a_file_system_without_allocation_has_sparse_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unsupported(fd: int, start: int, end: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "injected")

    monkeypatch.setattr(files, "allocate", unsupported)
    tier = open_tier(tmp_path, GEOMETRY.quota_for(16))
    data, index = (tmp_path / DATA_FILE).stat(), (tmp_path / INDEX_FILE).stat()
    assert 512 * data.st_blocks < data.st_size  # sparse: its room is found when it is written
    assert 512 * index.st_blocks >= index.st_size  # a full disk still takes the records
    fill(tier, 2)
    assert held_prompts(tier, 2) == [0, 1]
    assert usage(tmp_path) <= GEOMETRY.quota_for(16)
    tier.close()
