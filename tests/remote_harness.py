"""Remote stores for the contract tests. Each is started once, and emptied after every test."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from block_images import BLOCK_SIZE
from mooncake_server import MooncakeMaster
from patience import PATIENCE_S
from redis_server import PASSWORD, QUOTED, RedisCluster, RedisServer
from remote_blocks import stored_key
from s3_server import S3Server
from tier_harness import Harness, flip

from quire.kv.image import BlockName, header_bytes
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.pack import read_name
from quire.kv.tiers.remote.client import Value
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.mooncake.client import MooncakeClient
from quire.kv.tiers.remote.mooncake.url import setup_of
from quire.kv.tiers.remote.open import open_remote
from quire.kv.tiers.remote.tier import value_shape
from quire.kv.tiers.tier import Tier


class RemoteHarness(Harness):
    url: str

    def __init__(self) -> None:
        self._open: list[Tier] = []

    def open(self) -> Tier:
        patient = f"{self.url}{'&' if '?' in self.url else '?'}timeout=60"  # the machine is busy
        self._open.append(open_remote(patient, self.image_bytes, BLOCK_SIZE))
        return self._open[-1]

    def clean_up(self) -> None:
        for tier in self._open:
            tier.close()


class RedisHarness(RemoteHarness):
    """`kind` is how the server is reached."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.url, self._servers = _redis(kind)

    def flip_a_bit(self, name: BlockName) -> None:
        for server in self._servers:
            held = server.plain.keys()
            if stored_key(name).encode() in held:
                value = bytearray(server.plain.get(stored_key(name)))
                value[-777] ^= 1
                server.plain.set(stored_key(name), bytes(value))

    def clean_up(self) -> None:
        super().clean_up()
        for server in self._servers:
            server.plain.flushall()


class MooncakeHarness(RemoteHarness):
    def __init__(self) -> None:
        super().__init__()
        self.url, self._lender = _mooncake()
        self._written: set[str] = set()

    def open(self) -> Tier:
        tier = super().open()
        write = tier.write

        def noted(names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
            self._written |= set(map(stored_key, names))
            return write(names, images)

        tier.write = noted  # type: ignore[method-assign]
        return tier

    def flip_a_bit(self, name: BlockName) -> None:
        sizes = header_bytes(BLOCK_SIZE), self.image_bytes
        value = Value(*(memoryview(bytearray(size)) for size in sizes))
        key = [stored_key(name)]
        assert list(self._lender.fetch(key, [value], Deadline(PATIENCE_S))) == [(0, sum(sizes))]
        value.image[-777] ^= 1
        self._lender.delete(key, Deadline(PATIENCE_S))
        assert list(self._lender.store(key, [value], Deadline(PATIENCE_S))) == [(0, "")]

    def clean_up(self) -> None:
        super().clean_up()
        if self._written:
            self._lender.delete(sorted(self._written), Deadline(PATIENCE_S))


class MountHarness(RemoteHarness):
    """A folder that is as good as a mount."""

    def __init__(self, folder: Path, options: str = "") -> None:
        super().__init__()
        self._folder = folder / "archive"
        self._folder.mkdir()
        self.url = f"file://{self._folder}{options}"

    def flip_a_bit(self, name: BlockName) -> None:
        flip_in_pack(self._folder, name)


class BucketHarness(RemoteHarness):
    """Each has a prefix of its own, so that there is nothing to clean up."""

    _prefixes = count()

    def __init__(self) -> None:
        super().__init__()
        self._server = _s3()
        self.url = self._server.url(prefix=f"kv-{next(self._prefixes)}")

    def flip_a_bit(self, name: BlockName) -> None:
        flip_in_pack(self._server.bucket / urlsplit(self.url).path.strip("/"), name)


def flip_in_pack(folder: Path, name: BlockName) -> None:
    """In the file below `folder` that has this block."""
    short = int.from_bytes(name.key[:8], "big")
    for path in folder.rglob("*"):
        spans = read_name(f"{path.parent.name}/{path.name}")
        if spans and short in spans:
            flip(path, spans[short].start + spans[short].size - 777)


@cache
def _s3() -> S3Server:
    scratch = tempfile.TemporaryDirectory(prefix="quire-test-")
    atexit.register(scratch.cleanup)
    server = S3Server(Path(scratch.name))
    atexit.register(server.kill)
    return server


@cache
def _redis(kind: str) -> tuple[str, list[RedisServer]]:
    scratch = tempfile.TemporaryDirectory(prefix="quire-test-")
    atexit.register(scratch.cleanup)
    folder = Path(scratch.name)
    if kind == "cluster":
        cluster = RedisCluster(folder)
        atexit.register(cluster.kill)
        return cluster.url, cluster.nodes
    server = RedisServer(folder, password=PASSWORD, tls=kind == "tls")
    atexit.register(server.kill)
    host = f":{QUOTED}@127.0.0.1:{server.port}/0"
    urls = {
        "tcp": f"redis://{host}",
        "tls": f"rediss://{host}?ssl_ca_certs={server.ca_file}",
        "socket": f"unix://:{QUOTED}@{server.socket}",
    }
    return urls[kind], [server]


@cache
def _mooncake() -> tuple[str, MooncakeClient]:
    master = MooncakeMaster()
    shape = value_shape(Harness.image_bytes, BLOCK_SIZE)
    lender = MooncakeClient(setup_of(Address.parse(f"{master.url}?segment=64MiB")), shape, 5.0)
    lender.connect()
    atexit.register(master.kill)
    atexit.register(lender.close)
    return master.url, lender
