"""Every adapter that was asked for: by its name, and by its contents in host memory.

    LoRARequest ─► AdapterSource ─ read by threads ─► Adapter (one for each fingerprint)
                                                         │ a copy in host memory, up to a number
                                                         ╰ a slot of the device (`AdapterSlots`)

When host memory has more copies than it may, those go that are needed least, and with them their
slots. A sequence whose adapter is gone has it read again when its turn comes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from quire.engine.adapters.adapter import Adapter, AdapterRunner
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.adapters.source import AdapterSource, Reading
from quire.engine.sequence import Request
from quire.errors import QuireError
from quire.kv.keys import adapter_namespace
from quire.lora_request import LoRARequest
from quire.runner.plan import AdapterInfo

log = logging.getLogger("quire")

MOST_SOURCES = 4096  # remembered, those asked for last
MOST_READERS = 4  # threads that read folders
CORES_PER_READER = 4  # at least: steps need some, too


class AdapterCatalog:
    """`find` may be called from any thread, all else between two steps."""

    def __init__(self, runner: AdapterRunner, num_slots: int, most_in_host: int) -> None:
        self.slots = AdapterSlots(runner, num_slots, self._read)
        self.most_in_host = most_in_host
        self.num_reads = 0
        self.num_evictions = 0
        self._runner = runner
        self._lock = threading.Lock()
        self._sources: OrderedDict[LoRARequest, AdapterSource] = OrderedDict()
        self._adapters: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
        self._in_host: dict[str, Adapter] = {}
        self._uses = count(1)
        self._readers = ThreadPoolExecutor(_num_readers(), "quire-adapters")  # begin when needed
        self._being_read: dict[AdapterSource, int] = {}  # and how many drops there were before
        self._read_done: deque[AdapterSource] = deque()
        self._dropped: dict[str, int] = {}  # by fingerprint, which drop; while folders are read
        self._num_drops = 0

    def find(self, asked: LoRARequest) -> AdapterSource:
        """Begin to read its folder, unless that was done."""
        with self._lock:
            source = self._sources.pop(asked, None)
            if source is None or source.has_failed or not source.is_for(asked):
                known = source.fingerprint if source is not None else ""
                source = AdapterSource(asked, asked.fingerprint or known)
                self._begin(source)
            self._sources[asked] = source
            if len(self._sources) > MOST_SOURCES:
                self._sources.popitem(last=False)
        return source

    # --- requests -------------------------------------------------------------------------------

    def attach(self, request: Request) -> None:
        """The request's folder is read: it is computed with that adapter from now on."""
        assert request.lora is not None and request.lora.adapter is not None
        adapter = request.adapter = request.lora.adapter
        adapter.requests[request.number] = None
        self.slots.num_requests += 1
        adapter.last_used = next(self._uses)
        request.namespace = adapter_namespace(request.namespace, adapter.fingerprint)

    def detach(self, request: Request) -> None:
        """The request has ended."""
        adapter = request.adapter
        if adapter is None or adapter.requests.pop(request.number, self) is self:
            return
        adapter.last_used = next(self._uses)
        if adapter.is_unloaded and not adapter.requests:
            self._drop(adapter)

    def forget(self, asked: LoRARequest) -> None:
        """Nobody will ask for it again. Requests that have it go on with what was read."""
        with self._lock:
            source = self._sources.pop(asked, None)
            others = {each.fingerprint for each in self._sources.values()}
        if source is None or source.adapter is None or source.fingerprint in others:
            return
        source.adapter.is_unloaded = True
        if not source.adapter.requests:
            self._drop(source.adapter)

    # --- reading --------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        return bool(self._being_read)

    def take_read(self, in_use: Collection[Adapter]) -> list[AdapterSource]:
        """Take what was read; returns the sources that cannot be used.

        `in_use` have sequences that hold blocks: these stay in host memory.
        """
        failed = []
        while self._read_done:
            source = self._read_done.popleft()
            info, source.error = source.reading.result()
            with self._lock:
                began = self._being_read.pop(source)
                is_known = self._sources.get(source.asked) is source
            adapter = self._keep(info, began) if info is not None else None
            if source.error is not None:
                failed.append(source)
                if adapter is not None and not adapter.is_wanted:
                    self._drop(adapter)
            elif adapter is not None:
                source.adapter, source.fingerprint = adapter, adapter.fingerprint
                adapter.is_unloaded = adapter.is_unloaded and not is_known
        if not self._being_read:
            self._dropped.clear()
        self._trim(in_use)
        return failed

    def wait(self, timeout: float) -> None:
        """Until a folder is read, or the time is over."""
        with self._lock:
            under_way = next(iter(self._being_read), None)
        if under_way is not None:
            under_way.wait(timeout)

    def _read(self, source: AdapterSource) -> None:
        """Read it again, unless others are needed more, which host memory has already.

        One at a time, the first that is asked for: what it displaces is known only afterwards.
        """
        assert source.adapter is not None
        if len(self._in_host) >= self.most_in_host:
            in_host, is_in_use = self._in_host.values(), self.slots.is_in_use
            idle = [adapter.need for adapter in in_host if not is_in_use(adapter)]
            if not idle or source.adapter.need <= min(idle):
                return
        with self._lock:
            if all(each.adapter is None for each in self._being_read):
                self._begin(source)

    def _begin(self, source: AdapterSource) -> None:
        self._being_read[source] = self._num_drops
        source.reading = self._readers.submit(self._read_folder, source)
        source.reading.add_done_callback(lambda _: self._read_done.append(source))

    def _read_folder(self, source: AdapterSource) -> Reading:
        asked, expected = source.asked, source.fingerprint
        try:
            info = self._runner.read_adapter(asked.lora_path)
        except QuireError as error:
            return Reading(None, str(error))
        except Exception as error:
            log.exception("The adapter %s cannot be read.", asked.lora_name)
            kind = type(error).__name__
            return Reading(
                None,
                f"The adapter {asked.lora_name!r} cannot be read from {asked.lora_path} ({kind}); "
                "see the log.",
            )
        with self._lock:
            self.num_reads += 1
        if expected and info.fingerprint != expected:
            return Reading(
                info,
                f"The adapter {asked.lora_name!r} in {asked.lora_path} has changed since it was "
                "loaded; load it again, in Python with another lora_int_id.",
            )
        return Reading(info)

    # --- host memory ----------------------------------------------------------------------------

    def _keep(self, info: AdapterInfo, began: int) -> Adapter:
        """What was read, beginning when there had been so many drops, is in host memory.

        But if the same contents, read from elsewhere, were dropped meanwhile: then it is not known
        which came first, and they are dropped for sure.
        """
        adapter = self._adapters.get(info.fingerprint)
        if adapter is None:
            adapter = self._adapters[info.fingerprint] = Adapter(info)
            adapter.last_used = next(self._uses)
        if self._dropped.get(info.fingerprint, 0) > began and not adapter.is_in_host:
            self._forget_copy(adapter)
        else:
            adapter.is_in_host = True
            self._in_host[info.fingerprint] = adapter
        return adapter

    def _trim(self, in_use: Collection[Adapter]) -> None:
        while len(self._in_host) > self.most_in_host:
            idle = [adapter for adapter in self._in_host.values() if adapter not in in_use]
            if not idle:
                return
            self._drop(min(idle, key=lambda adapter: adapter.need))
            self.num_evictions += 1

    def _drop(self, adapter: Adapter) -> None:
        self.slots.free(adapter)
        if self._in_host.pop(adapter.fingerprint, None) is not None:
            adapter.is_in_host = False
            self._forget_copy(adapter)

    def _forget_copy(self, adapter: Adapter) -> None:
        self._num_drops += 1
        self._dropped[adapter.fingerprint] = self._num_drops
        self._runner.forget_adapter(adapter.fingerprint)

    # --- what is going on -----------------------------------------------------------------------

    def close(self) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, Any]:
        return {
            "max_loras": self.slots.count,
            "in_slots": len(self.slots.adapters),
            "in_host": len(self._in_host),
            "reads": self.num_reads,
            "loads": self.slots.num_loads,
            "evictions": self.num_evictions,
        }


def _num_readers() -> int:
    return max(1, min(MOST_READERS, (os.cpu_count() or 1) // CORES_PER_READER))
