"""What must hold after every step, when all is quiet, and when an engine is gone."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
from fake_model import POISON, check_idle, check_invariants
from patience import PATIENCE_S

from quire.engine.engine import Engine
from quire.kv.store import KVStore
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.ssd.tier import SsdTier
from soak.tally import Tally
from soak.violation import require, require_soon

QUIET_S = PATIENCE_S  # for transfers that were begun to end, whatever the disk and the network do
MEMORY_GROWTH_MIB = 96.0  # between the first rounds and any later one
ROUNDS_TO_WARM_UP = 3


class StepChecks:
    """Invariants of the engine and of its tiers, and that nothing writes into a free block."""

    def __init__(self, engine: Engine, ssd: SsdTier | None) -> None:
        self.engine, self.ssd = engine, ssd
        self._poisoned = np.empty(0, dtype=np.int64)

    def before_step(self) -> None:
        """Between steps nothing may have landed in a free block."""
        pool = self.engine.runner.pool
        clean = (pool[self._poisoned] == POISON).all()
        require(clean, "A copy landed in a block that had been given back.")

    def after_step(self) -> None:
        engine = self.engine
        check_invariants(engine)
        check_host(engine.scheduler.tiering.store.host)
        if self.ssd is not None:
            check_catalog(self.ssd)
        engine.runner.after_step()
        copied = {source for source, _ in engine.runner.planned_copies()}
        free = set(engine.scheduler.cache.allocator._free) - copied
        self._poisoned = np.array(sorted(free), dtype=np.int64)


def check_host(host: HostTier) -> None:
    with host._changed:
        free, keyed, held = list(host._free), set(host._keys), set(host._held)
        slots = dict(host._slots)
    require(len(slots) <= host.capacity, "Host memory keeps more images than it may.")
    require(len(free) == len(set(free)), "A slot of host memory is free twice.")
    mixed = set(free) & (keyed | held)
    require(not mixed, f"Slots {mixed} of host memory are free and in use.")
    require(set(slots.values()) == keyed, "Host memory's keys and slots do not agree.")
    everywhere = set(free) | keyed | held
    require(len(everywhere) == host.memory.num_slots, "A slot of host memory is lost.")


def check_catalog(ssd: SsdTier) -> None:
    catalog = ssd._store.catalog
    with catalog._lock:
        places = list(catalog.places.values())
        volumes = len(catalog._free)
        free = [slot * volumes + v for v, each in enumerate(catalog._free) for slot in each]
    require(len(places) == len(set(places)), "Two blocks share a slot of the disk.")
    require(len(free) == len(set(free)), "A slot of the disk is free twice.")
    require(not set(places) & set(free), "A slot of the disk is free and in use.")


def check_quiet(engine: Engine, ssd: SsdTier | None) -> None:
    """No request is left."""
    store: KVStore = engine.scheduler.tiering.store
    require(store.flush(QUIET_S), f"Transfers go on {QUIET_S:.0f} s after the last request.")
    check_idle(engine)
    host = store.host
    # Prefetches have no handle: they may outlive the last request by a read.
    require_soon(lambda: not host._held, QUIET_S, "Slots of host memory stay held.")
    require(not store.handles.of(), "A handle is open though nothing is under way.")
    check_host(host)
    if ssd is not None:
        catalog = ssd._store.catalog
        require(not catalog._readers, "Slots of the disk are still pinned.")
        require(not catalog._being_written, "Blocks of the disk are still marked as being written.")
        require(not catalog._dropped, "Slots of the disk wait for readers that have gone.")
        check_catalog(ssd)


def check_quota(folder: Path, quota: int) -> None:
    used = sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    require(used <= quota, f"The SSD cache takes {used:,} bytes of disk; its quota is {quota:,}.")


class Leaks:
    """Threads, descriptors and memory: after each round as few as after the first."""

    def __init__(self) -> None:
        self._rounds = 0
        self._descriptors = self._threads = 0
        self._memory = 0.0

    def check(self, tally: Tally) -> None:
        gc.collect()
        require_soon(lambda: not _own_threads(), 5.0, "Threads of the engine outlive it.")
        tally.memory_mib = _resident_mib()
        self._rounds += 1
        if self._rounds <= ROUNDS_TO_WARM_UP:
            self._descriptors = max(self._descriptors, _descriptors())
            self._threads = max(self._threads, threading.active_count())
            self._memory = max(self._memory, tally.memory_mib)
            return
        require_soon(
            lambda: _descriptors() <= self._descriptors,
            5.0,
            f"More than the {self._descriptors} file descriptors of the first rounds are open.",
        )
        require_soon(
            lambda: threading.active_count() <= self._threads,
            5.0,
            f"More than the {self._threads} threads of the first rounds are there.",
        )
        growth = tally.memory_mib - self._memory
        require(growth <= MEMORY_GROWTH_MIB, f"Resident memory has grown by {growth:.0f} MiB.")


def _own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("quire")]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
