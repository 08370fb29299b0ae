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

from quire.kv.tiers.ssd.engine import choose_engine
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 10_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)


def open_tier(folder: Path) -> SsdTier:
    quota = GEOMETRY.quota_for(3)
    return SsdTier([folder], quota, IMAGE_BYTES, BLOCK_SIZE, engine=OneByOne())


def write_and_die(folder: Path, disk: FaultyDisk, stop_after: int) -> int:
    """Three blocks, and three more over them; nothing arrives after byte `stop_after`."""
    tier = open_tier(folder)
    disk.written, disk.stop_after = 0, stop_after
    for salt in (0, 1):
        tier.write(chain(3, salt), filled(3, IMAGE_BYTES, seed=salt))
    disk.stop_after = None
    for volume in tier._store.volumes.values():
        volume.close()  # as the end of a process does: files are closed and nothing is said
    return disk.written


def test_a_stop_after_any_byte_leaves_blocks_whole_or_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = FaultyDisk(monkeypatch, tmp_path)
    total = write_and_die(tmp_path / "all", disk, stop_after=1 << 40)
    record_edges = range(total - 130, total + 1)  # the last record, byte by byte
    stops = sorted({*range(0, total, 1999), *record_edges})
    held_at_all = 0
    for stop in stops:
        folder = tmp_path / str(stop)
        write_and_die(folder, disk, stop)
        tier = open_tier(folder)
        for salt in (0, 1):
            names, found = chain(3, salt), empty(3, IMAGE_BYTES)
            held = tier.contains(keys(names))
            assert tier.read(names, found) == held  # what it says it holds is whole
            images = filled(3, IMAGE_BYTES, seed=salt)
            for at in (at for at, is_held in enumerate(held) if is_held):
                assert same(found[at : at + 1], images[at : at + 1], IMAGE_BYTES)
            held_at_all += sum(held)
        assert set(tier.counters.drops) <= {"torn"}  # a record of which a part arrived
        assert all(tier.write(chain(3, 2), filled(3, IMAGE_BYTES)))
        tier.close()
    assert held_at_all > len(stops)


WRITER = """
import sys
from pathlib import Path
from block_images import BLOCK_SIZE, chain, image_of
from quire.kv.tiers.ssd.engine import choose_engine
from quire.kv.tiers.ssd.tier import SsdTier

folder, quota, image_bytes, engine = sys.argv[1:]
engine = choose_engine(engine)
tier = SsdTier([Path(folder)], int(quota), int(image_bytes), BLOCK_SIZE, engine=engine)
prompts = [chain(8, salt) for salt in range(6)]
images = [[image_of(name, int(image_bytes)) for name in names] for names in prompts]
print("ready", flush=True)
while True:  # more than fits: every write pushes something out
    for names, filled in zip(prompts, images):
        tier.write(names, filled)
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
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(delays.uniform(0.05, 0.15))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()

        engine = choose_engine(engine_name)
        tier = SsdTier([tmp_path], quota, image_bytes, BLOCK_SIZE, engine=engine)
        held = [name for name in everything if tier.contains([name.key])[0]]
        found = empty(len(held), image_bytes)
        assert len(held) >= 4 and all(tier.read(held, found))
        assert same(found, [image_of(name, image_bytes) for name in held], image_bytes)
        assert not tier.counters.drops
        assert tier.stats()["bytes_on_disk"] <= quota
        tier.close()
