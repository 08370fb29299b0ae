"""The thread that lists an archive now and then and, where there is a quota, sweeps it.

Of all machines with a quota one sweeps: the one whose note in the archive is fresh. Nothing depends
on there being only one: two would delete the same packs, those used least lately.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
import uuid

from quire.kv.tiers.remote.archive.index import PackIndex
from quire.kv.tiers.remote.archive.objects import Listed, Objects
from quire.kv.tiers.remote.archive.pack import Span, packed_bytes, read_name

log = logging.getLogger("quire")

NOTE = "sweeper.json"  # who sweeps, and until when another need not
SWEEP_S = 60.0  # between sweeps, and how long a note is fresh, twice
SWEPT_TO = 0.9  # of the quota
MOST_PINNED = 0.5  # of the quota: what is pinned must not keep out all else


class Keeper:
    """`listed` is set once there is an index; it begins when it is started."""

    def __init__(
        self, objects: Objects, index: PackIndex, refresh: float, quota: int | None
    ) -> None:
        self.listed = threading.Event()
        self._objects, self._index, self._refresh, self._quota = objects, index, refresh, quota
        self._id = uuid.uuid4().hex
        self._sweep_at = 0.0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._listing = threading.Lock()

    def start(self) -> None:
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(
                target=self._keep, name="quire-remote-lister", daemon=True
            )
            self._thread.start()

    def sweep_soon(self) -> None:
        """The quota is used up."""
        self._sweep_at = min(self._sweep_at, time.monotonic())
        self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            try:
                self.list()
                self.listed.set()
                if self._quota is not None and time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + SWEEP_S
                    if self._is_the_sweeper():
                        sweep(self._objects, self._index, self._quota)
            except OSError as error:  # the breaker finds out by itself
                log.debug("The archive could not be listed: %s", error)
            self._wake.wait(self._refresh * random.uniform(0.9, 1.1))

    def list(self) -> None:
        """Bring the index up to date. One at a time: each forgets what came before it began."""
        with self._listing:
            self._index.begin_listing()
            self._index.end_listing(self._objects.names())

    def _is_the_sweeper(self) -> bool:
        now = time.time()
        try:
            [text] = self._objects.read(NOTE, [Span(0, 1 << 10)])
            note = json.loads(bytes(text))
            if note["id"] != self._id and now < note["until"] < now + 4 * SWEEP_S:
                return False
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            pass  # none yet, or none that can be read
        mine = {"id": self._id, "until": now + 2 * SWEEP_S}
        self._objects.write(NOTE, json.dumps(mine).encode())
        return True


def sweep(objects: Objects, index: PackIndex, quota: int) -> int:
    """Delete packs until the rest leaves some of the quota free; how many bytes were deleted.

    Those used least lately go first. What is pinned counts, but stays, up to half of the quota: of
    more than that, what is pinned for the shortest time goes before all else.
    """
    now, most = time.time(), int(SWEPT_TO * quota)
    packs = sorted((pack for pack in objects.listed() if read_name(pack.name)), key=_used_at)
    total = left = sum(packed_bytes(pack.name) for pack in packs)
    pinned = [name for name, used_at in packs if used_at > now]
    plain = [name for name, used_at in packs if used_at <= now]
    room = int(MOST_PINNED * quota)
    while pinned and (room := room - packed_bytes(pinned[-1])) >= 0:
        pinned.pop()
    for name in [*pinned, *plain]:
        if left <= most:
            break
        objects.delete(name)
        index.discard(name)
        left -= packed_bytes(name)
    objects.tidy()
    return total - left


def _used_at(pack: Listed) -> float:
    return pack.used_at
