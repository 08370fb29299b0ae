"""The remote tier against the plainest means of the same store, in the same run.

The tier writes blocks that are new to the store (it asks for them first, and adds header and
checksum) and reads them back into memory that is given to it (verified). Of a Redis server the
plain client is redis-py, with hiredis where that is installed: it sets and gets values of the same
size, in pipelines as long as the tier's batches, and does nothing else; its values end as Python's
bytes. Of a mount it is `cp`, of a bucket `rclone`, both between files in memory and the store. Each
round measures all in turn, the tier first in one and last in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from quire.bench.kv.plain_stores import plain_store
from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row
from quire.errors import QuireError
from quire.kv.image import BlockName
from quire.kv.keys import block_key
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.remote.tier import RemoteTier, value_shape

BLOCK_SIZE = 16
IMAGE_BYTES = [8 << 20, 2_359_296]  # a round number, and a block of qwen3-8b in bfloat16
MOVED_BYTES = 128 << 20  # by one call
ROOT = bytes(32)
WARM_UPS = 2


def bandwidth(
    url: str, *, image_bytes: int, blocks: int | None = None, repeat: int = 9
) -> list[Row]:
    """Calls with `blocks` blocks: GB/s, and the share of the plain rate if there is one."""
    contest = _Contest(url, image_bytes, blocks or max(1, MOVED_BYTES // image_bytes))
    try:
        rounds = []
        with runs_bar("remote", repeat) as bar:
            for number in range(WARM_UPS + repeat):
                rounds.append(contest.round())
                bar.update(number >= WARM_UPS)
    finally:
        contest.close()
    rounds = rounds[WARM_UPS:]
    rows = []
    for way in ("read", "write"):
        row: Row = {"way": way, "MB": image_bytes / 1e6, "store": contest.store}
        row["GB/s"] = Sample(rates[way] for rates in rounds)
        if contest.has_plain:
            plain = f"plain {way}"
            row["plain GB/s"] = Sample(rates[plain] for rates in rounds)
            row["share of plain"] = Sample(rates[way] / rates[plain] for rates in rounds)
        rows.append(row)
    return rows


class _Contest:
    """A tier and, where there is one, a plain client of its store."""

    def __init__(self, url: str, image_bytes: int, blocks: int) -> None:
        address = Address.parse(url)
        self.store = address.shown
        self._tier = open_remote(url, image_bytes, BLOCK_SIZE)
        if reason := self._tier.stats()["last_error"]:
            self._tier.close()
            raise QuireError(f"The remote cache {self.store} does not answer: {reason}")
        memory = memoryview(bytearray(np.random.default_rng(0).bytes(2 * blocks * image_bytes)))
        images = [memory[i : i + image_bytes] for i in range(0, len(memory), image_bytes)]
        self._sources, self._targets = images[:blocks], images[blocks:]
        values = [bytes(image) for image in self._sources]
        batch = value_shape(image_bytes, BLOCK_SIZE).batch
        self._plain = plain_store(address, values, batch)
        self.has_plain = self._plain is not None
        self._number = 0

    def round(self) -> dict[str, float]:
        """The rates of one pass, in GB/s; afterwards the store is as it was."""
        self._number += 1
        names = _chain(self._number, len(self._sources))
        turns: dict[str, Callable[[], object]] = {
            "write": lambda: self._tier.write(names, self._sources),
            "read": lambda: self._tier.read(names, self._targets),
        }
        if self._plain is not None:
            turns = {
                "write": turns["write"],
                "plain write": partial(self._plain.write, self._number),
                "read": turns["read"],
                "plain read": partial(self._plain.read, self._number),
            }
        order = list(turns)
        if self._number % 2 and self._plain is not None:
            order = [order[i] for i in (1, 0, 3, 2)]
        rates = {name: self._rate(turns[name]) for name in order}
        self._clear(names)
        return rates

    def close(self) -> None:
        self._tier.close()
        if self._plain is not None:
            self._plain.close()

    def _rate(self, call: Callable[[], object]) -> float:
        started = time.perf_counter()
        done = call()
        seconds = time.perf_counter() - started
        if isinstance(done, list) and not all(done):
            told = self._tier.stats()
            reason = told["last_error"] or told["last_refusal"] or "it evicted them"
            raise QuireError(
                f"The remote cache did not take or give all blocks ({reason}); give it more room."
            )
        return sum(map(len, self._sources)) / seconds / 1e9

    def _clear(self, names: Sequence[BlockName]) -> None:
        if isinstance(self._tier, RemoteTier):
            self._tier.forget([name.key for name in names])
        if self._plain is not None:
            self._plain.clear(self._number)


def _chain(number: int, blocks: int) -> list[BlockName]:
    """The names of a prompt's blocks, a different prompt for every number."""
    names, parent = [], ROOT
    for at in range(blocks):
        tokens = np.arange(BLOCK_SIZE, dtype="<i4") + BLOCK_SIZE * (number * blocks + at)
        key = block_key(parent, tokens.tolist())
        names.append(BlockName(key, parent, ROOT, tokens.tobytes()))
        parent = key
    return names
