"""The remote tier against a plain client of the same server, in the same run.

The tier writes blocks that are new to the store (it asks for them first, and adds header and
checksum) and reads them back into memory that is given to it (verified). The plain client is
redis-py, with hiredis where that is installed: it sets and gets values of the same size, in
pipelines as long as the tier's batches, and does nothing else; its values end as Python's bytes.
Each round measures all in turn, the tier first in one and last in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
    """Calls with `blocks` blocks: GB/s, and for a Redis server the share of the plain rate."""
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
    """A tier and, for one Redis server, a plain client of it."""

    def __init__(self, url: str, image_bytes: int, blocks: int) -> None:
        address = Address.parse(url)
        self.store = address.shown
        self._tier = open_remote(url, image_bytes, BLOCK_SIZE)
        if reason := self._tier.stats()["last_error"]:
            self._tier.close()
            raise QuireError(f"The remote cache {self.store} does not answer: {reason}")
        self._plain = _plain_client(address)
        self.has_plain = self._plain is not None
        self._batch = value_shape(image_bytes, BLOCK_SIZE).batch
        memory = memoryview(bytearray(np.random.default_rng(0).bytes(2 * blocks * image_bytes)))
        images = [memory[i : i + image_bytes] for i in range(0, len(memory), image_bytes)]
        self._sources, self._targets = images[:blocks], images[blocks:]
        self._values = [bytes(image) for image in self._sources]
        self._number = 0

    def round(self) -> dict[str, float]:
        """The rates of one pass, in GB/s; afterwards the store is as it was."""
        self._number += 1
        names = _chain(self._number, len(self._sources))
        keys = [f"quire-bench:{self._number}:{i}" for i in range(len(names))]
        turns: dict[str, Callable[[], list[bool]]] = {
            "write": lambda: self._tier.write(names, self._sources),
            "plain write": lambda: self._pipelined("set", keys),
            "read": lambda: self._tier.read(names, self._targets),
            "plain read": lambda: self._pipelined("get", keys),
        }
        order = list(turns)
        if self._number % 2:
            order = [order[i] for i in (1, 0, 3, 2)]
        rates = {name: self._rate(turns[name]) for name in order if self._plays(name)}
        self._clear(names, keys)
        return rates

    def close(self) -> None:
        self._tier.close()

    def _plays(self, name: str) -> bool:
        return self.has_plain or not name.startswith("plain")

    def _rate(self, call: Callable[[], list[bool]]) -> float:
        started = time.perf_counter()
        done = call()
        seconds = time.perf_counter() - started
        if not all(done):
            told = self._tier.stats()
            reason = told["last_error"] or told["last_refusal"] or "it evicted them"
            raise QuireError(
                f"The remote cache did not take or give all blocks ({reason}); give it more room."
            )
        return sum(map(len, self._sources)) / seconds / 1e9

    def _pipelined(self, command: str, keys: Sequence[str]) -> list[bool]:
        done: list[bool] = []
        for start in range(0, len(keys), self._batch):
            pipeline = self._plain.pipeline(transaction=False)
            for i, key in enumerate(keys[start : start + self._batch], start):
                words = (key, self._values[i]) if command == "set" else (key,)
                getattr(pipeline, command)(*words)
            done += [bool(reply) for reply in pipeline.execute()]
        return done

    def _clear(self, names: Sequence[BlockName], keys: Sequence[str]) -> None:
        if isinstance(self._tier, RemoteTier):
            self._tier.forget([name.key for name in names])
        if self._plain is not None:
            self._plain.unlink(*keys)


def _plain_client(address: Address) -> Any:
    if address.scheme == "mooncake" or address.scheme.endswith("+cluster"):
        return None
    import redis

    from quire.kv.tiers.remote.redis.url import connection_settings

    settings = connection_settings(address)
    return redis.Redis(connection_pool=redis.ConnectionPool(**settings, protocol=2))


def _chain(number: int, blocks: int) -> list[BlockName]:
    """The names of a prompt's blocks, a different prompt for every number."""
    names, parent = [], ROOT
    for at in range(blocks):
        tokens = np.arange(BLOCK_SIZE, dtype="<i4") + BLOCK_SIZE * (number * blocks + at)
        key = block_key(parent, tokens.tolist())
        names.append(BlockName(key, parent, ROOT, tokens.tobytes()))
        parent = key
    return names
