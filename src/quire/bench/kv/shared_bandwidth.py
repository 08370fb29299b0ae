"""A cache that a server shares, against host memory of the engine itself, in the same run.

Two stores have the blocks of one pool: one keeps them in its own host memory, the other has none
and reaches a server (`quire cache serve`). Each round puts and loads a new prompt with both, in
turns: what an engine would wait for, threads and checks included. A put is over when every tier has
its blocks, so the server's is over when they are on its disk.
"""

from __future__ import annotations

import time

import torch

from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row
from quire.errors import QuireError
from quire.kv.images import ImagePool
from quire.kv.keys import Namespace
from quire.kv.open import open_store
from quire.kv.store import KVStore

BLOCK_SIZE = 16
MOVED_BYTES = 128 << 20  # by one load
WARM_UPS = 2
PATIENCE_S = 60.0
_WAYS = ("read", "write")


def bandwidth(
    url: str, device: torch.device, *, image_bytes: int, blocks: int | None = None, repeat: int = 9
) -> list[Row]:
    """GB/s of loads and puts of `blocks` blocks, and their share of host memory's."""
    blocks = blocks or max(1, MOVED_BYTES // image_bytes)
    pool = ImagePool(torch.zeros(blocks, image_bytes, dtype=torch.uint8, device=device))
    pool.images.random_()
    namespace = Namespace(str(time.time_ns()), "any", "any", BLOCK_SIZE, "any", "none")
    stores = {
        "host": open_store(pool, namespace, host_cache_bytes=4 * blocks * (image_bytes + 4096)),
        "server": open_store(pool, namespace, remote_cache_url=url),
    }
    try:
        rounds: list[dict[str, float]] = []
        with runs_bar("shared", repeat) as bar:
            for number in range(WARM_UPS + repeat):
                order = sorted(stores, reverse=bool(number % 2))
                rates: dict[str, float] = {}
                for name in order:
                    rates |= _rates(name, stores[name], number, blocks, image_bytes)
                rounds.append(rates)
                bar.update(number >= WARM_UPS)
    finally:
        for store in stores.values():
            store.close()
    rounds = rounds[WARM_UPS:]
    return [
        {
            "way": way,
            "MB": image_bytes / 1e6,
            "store": url,
            "GB/s": Sample(rates[f"server {way}"] for rates in rounds),
            "plain GB/s": Sample(rates[f"host {way}"] for rates in rounds),
            "share of plain": Sample(
                rates[f"server {way}"] / rates[f"host {way}"] for rates in rounds
            ),
        }
        for way in _WAYS
    ]


def _rates(
    name: str, store: KVStore, number: int, blocks: int, image_bytes: int
) -> dict[str, float]:
    tokens = [number, *range(blocks * BLOCK_SIZE - 1)]
    started = time.perf_counter()
    put = store.put(tokens, range(blocks))
    is_kept = put.wait_until_kept(PATIENCE_S) and put.num_kept == blocks
    written = time.perf_counter()
    match = store.match(tokens)
    match.wait(PATIENCE_S)
    asked = time.perf_counter()
    load = match.load(range(len(match)))
    load.wait(PATIENCE_S)
    read = time.perf_counter()
    if not is_kept or load.num_loaded < blocks:
        told = store.stats().get("remote", {})
        reason = told.get("last_error") or "it has too little room"
        raise QuireError(f"The {name} cache did not take or give all blocks ({reason}).")
    moved = blocks * image_bytes / 1e9
    return {f"{name} write": moved / (written - started), f"{name} read": moved / (read - asked)}
