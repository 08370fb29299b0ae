"""The SSD tier against the disk under it: bandwidth beside plain direct I/O, and time to restart.

The tier writes new blocks over old ones (eviction, records, headers, checksums) and reads them back
(verified). The plain rate moves the same images in the same pieces between the same memory and a
file beside it, and does nothing else. Every round measures all of them in turn, because a disk
changes its mind; a share is of the best plain rate that any engine had in that round.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row
from quire.errors import QuireError
from quire.kv.image import BlockName
from quire.kv.keys import block_key
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.files import open_direct, open_private, page_aligned, reserve
from quire.kv.tiers.ssd.geometry import INDEX_FILE, Geometry, whole_pages
from quire.kv.tiers.ssd.io_engine import IoEngine, pieces
from quire.kv.tiers.ssd.records import RECORD, checks
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE

BLOCK_SIZE = 16
IMAGE_BYTES = 2_359_296  # a block of qwen3-8b in bfloat16
ROOT = bytes(32)
ROUNDS_HELD = 3  # a tier is full after as many: from then on every write pushes something out

Images = Sequence[memoryview]


def bandwidth(
    folder: Path, *, image_bytes: int = IMAGE_BYTES, blocks: int = 32, repeat: int = 9
) -> list[Row]:
    """One call with `blocks` blocks: GB/s of each engine, and its share of the plain rate."""
    memory = page_aligned(blocks * whole_pages(image_bytes))
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    size = len(memory) // blocks
    images = [memory[at * size : (at + 1) * size] for at in range(blocks)]
    with tempfile.TemporaryDirectory(dir=folder, prefix="quire-bench-") as scratch:
        contests = [_Contest(Path(scratch), engine, image_bytes, images) for engine in _engines()]
        try:
            rounds = []
            with runs_bar("disk", repeat) as bar:
                for number in range(ROUNDS_HELD + repeat):
                    rounds.append([contest.round() for contest in contests])
                    bar.update(number >= ROUNDS_HELD)
        finally:
            for contest in contests:
                contest.close()
    return _rows([contest.engine.name for contest in contests], rounds[ROUNDS_HELD:])


def _rows(engines: list[str], rounds: list[list[dict[str, float]]]) -> list[Row]:
    rows = []
    for way in ("read", "write"):
        best = [max(rates[f"plain {way}"] for rates in each) for each in rounds]
        for number, engine in enumerate(engines):
            mine = [each[number] for each in rounds]
            rows.append(
                {
                    "way": way,
                    "engine": engine,
                    "GB/s": Sample(rates[way] for rates in mine),
                    "plain GB/s": Sample(rates[f"plain {way}"] for rates in mine),
                    "share of best plain": Sample(
                        rates[way] / most for rates, most in zip(mine, best, strict=True)
                    ),
                }
            )
    return rows


def _engines() -> list[IoEngine]:
    """All that this machine has."""
    engines = []
    for name in ("io_uring", "threads"):
        try:
            engines.append(choose_engine(name))
        except OSError:
            continue
    return engines


class _Contest:
    """A tier and a plain file under one engine."""

    def __init__(self, folder: Path, engine: IoEngine, image_bytes: int, images: Images) -> None:
        self.engine = engine
        self._images = images
        self._number = 0
        quota = Geometry(image_bytes, BLOCK_SIZE).quota_for(len(images) * ROUNDS_HELD)
        self._tier = SsdTier(
            [folder / engine.name],
            quota,
            image_bytes,
            BLOCK_SIZE,
            engine=choose_engine(engine.name),
        )
        path = folder / f"{engine.name}.plain"
        self._file = open_private(path, create=True)
        reserve(self._file, len(images) * len(images[0]), may_be_sparse=True)
        if (direct := open_direct(path)) is not None:
            os.close(self._file)
            self._file = direct

    def round(self) -> dict[str, float]:
        """The rates of one pass, in GB/s."""
        self._number += 1
        names = _chain(self._number, len(self._images))
        return {
            "plain write": self._rate(lambda: self._plain(is_write=True)),
            "write": self._rate(lambda: self._tier.write(names, self._images)),
            "plain read": self._rate(lambda: self._plain(is_write=False)),
            "read": self._rate(lambda: self._tier.read(names, self._images)),
        }

    def _rate(self, call: Callable[[], list[bool]]) -> float:
        started = time.perf_counter()
        done = call()
        seconds = time.perf_counter() - started
        if not all(done):
            raise QuireError("The disk did not take or give all blocks; try another folder.")
        return sum(map(len, self._images)) / seconds / 1e9

    def _plain(self, *, is_write: bool) -> list[bool]:
        done: list[bool] = []
        size = len(self._images[0])
        self.engine.run(
            (
                transfer
                for at, image in enumerate(self._images)
                for transfer in pieces(self._file, at * size, [image], is_write, at)
            ),
            lambda transfer, result: done.append(result == transfer.size),
        )
        return done

    def close(self) -> None:
        self._tier.close()
        self.engine.close()
        os.close(self._file)


def _chain(number: int, blocks: int) -> list[BlockName]:
    """The names of a prompt's blocks, a different prompt for every number."""
    names, parent = [], ROOT
    for at in range(blocks):
        tokens = np.arange(BLOCK_SIZE, dtype="<i4") + BLOCK_SIZE * (number * blocks + at)
        key = block_key(parent, tokens.tolist())
        names.append(BlockName(key, parent, ROOT, tokens.tobytes()))
        parent = key
    return names


def restart_seconds(folder: Path, blocks: int, image_bytes: int = IMAGE_BYTES) -> Row:
    """How long a tier that holds `blocks` blocks takes to open.

    Only the index is filled, since the images are not looked at before they are read.
    """
    quota = Geometry(image_bytes, BLOCK_SIZE).quota_for(blocks)
    with tempfile.TemporaryDirectory(dir=folder, prefix="quire-bench-") as scratch:

        def opened() -> SsdTier:
            return SsdTier([Path(scratch)], quota, image_bytes, BLOCK_SIZE)

        started = time.perf_counter()
        opened().close()
        first = time.perf_counter() - started
        _fill_index(Path(scratch) / INDEX_FILE, blocks)
        started = time.perf_counter()
        tier = opened()
        seconds = time.perf_counter() - started
        found = tier.stats()["used"]
        tier.close()
    size = blocks * Geometry(image_bytes, BLOCK_SIZE).slot_bytes / 1e9
    return {"blocks": found, "GB": size, "first start s": first, "restart s": seconds}


def _fill_index(path: Path, blocks: int) -> None:
    random = np.random.default_rng(0)
    records = np.zeros(blocks, RECORD)
    records["key"] = np.frombuffer(random.bytes(32 * blocks), "V32")
    records["parent"] = np.roll(records["key"], 1)
    records["used"] = random.permutation(blocks).astype(np.uint64)
    records["check"] = checks(records)
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(records.tobytes())
