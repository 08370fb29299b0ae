"""A process that ends in mid-write leaves every block whole or absent, wherever it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, image_of, keys, same
from faulty_disk import FaultyDisk, OneByOne

from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 10_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)


def open_tier(folder: Path, slots: int = 3) -> SsdTier:
    quota = GEOMETRY.quota_for(slots)
    return SsdTier([folder], quota, IMAGE_BYTES, BLOCK_SIZE, engine=OneByOne())


def write_and_die(folder: Path, disk: FaultyDisk, stop_after: int | None) -> None:
    """Three blocks, and three more over them; nothing arrives after byte `stop_after`."""
    tier = open_tier(folder)
    disk.forget(stop_after)
    for salt in (0, 1):
        tier.write(chain(3, salt), filled(3, IMAGE_BYTES, seed=salt))
    disk.stop_after = None
    end(tier)


def end(tier: SsdTier) -> None:
    """As the end of a process does: files are closed, and nothing more is written."""
    for volume in tier._store.volumes.values():
        volume.close()


def check_that_what_is_held_is_whole(tier: SsdTier, count: int, salt: int) -> int:
    names, found = chain(count, salt), empty(count, IMAGE_BYTES)
    held = tier.contains(keys(names))
    assert tier.read(names, found) == held
    images = filled(count, IMAGE_BYTES, seed=salt)
    for at in (at for at, is_held in enumerate(held) if is_held):
        assert same(found[at : at + 1], images[at : at + 1], IMAGE_BYTES)
    return sum(held)


def test_a_stop_after_any_byte_leaves_blocks_whole_or_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = FaultyDisk(monkeypatch, tmp_path)
    write_and_die(tmp_path / "all", disk, stop_after=None)
    last_record = range(disk.written - 130, disk.written)  # byte by byte
    stops = [*disk.stops(step=5_000), *last_record]
    held_at_all = 0
    for stop in stops:
        folder = tmp_path / str(stop)
        write_and_die(folder, disk, stop)
        tier = open_tier(folder)
        held_at_all += sum(check_that_what_is_held_is_whole(tier, 3, salt) for salt in (0, 1))
        assert set(tier.counters.drops) <= {"torn"}  # a record of which a part arrived
        assert all(tier.write(chain(3, 2), filled(3, IMAGE_BYTES)))
        tier.close()
    assert held_at_all > len(stops)


def test_a_stop_while_a_smaller_cache_is_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = FaultyDisk(monkeypatch, tmp_path)
    stops: list[int | None] = [None]
    for stop in stops:  # the first pass says where to stop the others
        folder = tmp_path / str(stop)
        tier = open_tier(folder, slots=6)
        tier.write(chain(6), filled(6, IMAGE_BYTES))
        tier.use(keys(chain(6))[2:])
        tier.close()
        disk.forget(stop)
        end(open_tier(folder, slots=3))
        if stop is None:
            stops += disk.stops(step=3_000)
        disk.stop_after = None
        tier = open_tier(folder, slots=3)
        assert 2 <= check_that_what_is_held_is_whole(tier, 6, salt=0) <= 3
        assert set(tier.counters.drops) <= {"torn"}
        assert tier.stats()["bytes_on_disk"] <= GEOMETRY.quota_for(3)
        assert all(tier.write(chain(3, 2), filled(3, IMAGE_BYTES)))  # no slot was lost
        tier.close()


WRITER = """
import sys
from pathlib import Path
from block_images import BLOCK_SIZE, chain, image_of
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.tier import SsdTier

folder, quota, image_bytes, engine = sys.argv[1:]
engine = choose_engine(engine)
tier = SsdTier([Path(folder)], int(quota), int(image_bytes), BLOCK_SIZE, engine=engine)
prompts = [chain(8, salt) for salt in range(6)]
images = [[image_of(name, int(image_bytes)) for name in names] for names in prompts]
while True:  # more than fits: every write pushes something out
    for names, filled in zip(prompts, images):
        tier.write(names, filled)
    print("full", flush=True)
"""


def test_kill_9_in_mid_write(tmp_path: Path, engine_name: str) -> None:
    image_bytes = 300_000
    quota = Geometry(image_bytes, BLOCK_SIZE).quota_for(20)
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(quota), str(image_bytes)]
    tests = str(Path(__file__).parents[2])
    path = os.pathsep.join([tests, *sys.path])
    delays = random.Random(0)
    everything = [name for salt in range(6) for name in chain(8, salt)]
    for _ in range(4):
        writer = subprocess.Popen(
            [*command, engine_name], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"full\n"
        time.sleep(delays.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()

        engine = choose_engine(engine_name)
        tier = SsdTier([tmp_path], quota, image_bytes, BLOCK_SIZE, engine=engine)
        held = [name for name in everything if tier.contains([name.key])[0]]
        found = empty(len(held), image_bytes)
        assert len(held) >= 20 - 8 and all(tier.read(held, found))
        assert same(found, [image_of(name, image_bytes) for name in held], image_bytes)
        assert not tier.counters.drops
        assert tier.stats()["bytes_on_disk"] <= quota
        tier.close()
