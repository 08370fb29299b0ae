"""Servers of a shared cache, for tests: one in this process, and one that can be killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from block_images import BLOCK_SIZE
from patience import eventually
from processes import Killable
from remote_harness import RemoteHarness
from tier_harness import ROOM, Harness

from quire.kv.image import BlockName
from quire.kv.tiers.shared.protocol import Shape
from quire.kv.tiers.shared.server import CacheServer
from quire.kv.tiers.shared.settings import CacheSettings
from quire.kv.tiers.ssd.geometry import Geometry

IMAGE_BYTES = 50_000


def settings(folder: Path, image_bytes: int, host_blocks: int = ROOM) -> CacheSettings:
    quota = Geometry(image_bytes, BLOCK_SIZE).quota_for(ROOM)
    host = host_blocks * Shape(BLOCK_SIZE, (image_bytes,)).stride
    return CacheSettings([folder / "kv"], quota, host)


class SharedCacheHarness(RemoteHarness):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.server = CacheServer(folder / "socket", settings(folder, Harness.image_bytes))
        self.url = self.server.url

    def flip_a_bit(self, name: BlockName) -> None:
        """In host memory, once the disk's copy is gone: else that one would do as well."""
        cache = self.server._cache
        assert cache is not None
        store = cache.ssd._store
        eventually(lambda: cache.ssd.contains([name.key]) == [True])
        [pin] = store.catalog.pin([name.key])
        store.drop(pin, "test")
        store.catalog.unpin([pin])
        [slot] = cache.host.hold([name.key])
        cache.host.memory.image(slot)[777] ^= 1
        cache.host.release([slot])

    def clean_up(self) -> None:
        super().clean_up()
        self.server.close()


class ServerProcess(Killable):
    """`quire cache serve`, which is killed and started again."""

    def __init__(self, folder: Path, *sizes: str) -> None:
        self.socket = folder / "kv" / "quire-kv.sock"
        command = [sys.executable, "-m", "quire", "cache", "serve", str(folder / "kv")]
        self._command = [*command, *sizes]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        assert self.process.stderr.readline().startswith(b"serving at")
