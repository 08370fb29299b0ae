"""Clients that are broken or mean: they end their own connection and nothing else."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys, same
from patience import PATIENCE_S, eventually
from shared_cache import IMAGE_BYTES

from quire.framing import frame, pack
from quire.kv.image import BlockName, header
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.shared import server as server_module
from quire.kv.tiers.shared import session as session_module
from quire.kv.tiers.shared.channel import Channel
from quire.kv.tiers.shared.protocol import MOST_FRAME_BYTES, MOST_KEYS, Operation, Shape
from quire.kv.tiers.shared.server import CacheServer
from quire.kv.tiers.tier import Tier

OpenTier = Callable[..., Tier]

SHAPE = Shape(BLOCK_SIZE, (IMAGE_BYTES,))
NAMES, IMAGES = chain(4), filled(4, IMAGE_BYTES)
HELLO = SHAPE.hello()


@pytest.fixture
def bystander(server: CacheServer, open_tier: OpenTier) -> Tier:
    tier = open_tier()
    assert all(tier.write(NAMES, IMAGES))
    return tier


def check_unharmed(server: CacheServer, bystander: Tier) -> None:
    found = empty(len(NAMES), IMAGE_BYTES)
    assert all(bystander.read(NAMES, found)) and same(found, IMAGES, IMAGE_BYTES)
    eventually(lambda: server.stats()["connections"] == 4, "a connection is left")
    eventually(lambda: server.stats()["host"]["held"] == 0, "a slot is held for good")
    assert bystander.stats()["errors"] == 0


def raw(server: CacheServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(server.path))
    return sock


def channel(server: CacheServer) -> Channel:
    return Channel().open(server.path, SHAPE, Deadline(PATIENCE_S))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        frame(b"{"),
        frame(b"[" * 60_000),
        frame(b"\xff\xfe"),
        pack([1, 2]),
        pack({**HELLO, "version": 99}),
        pack({**HELLO, "block_size": -16}),
        pack({**HELLO, "block_size": 15}),
        pack({**HELLO, "block_size": 1 << 40}),
        pack({**HELLO, "image_bytes": [1 << 60]}),
        pack({**HELLO, "image_bytes": [1] * 100_000}),
        pack({**HELLO, "image_bytes": [True]}),
        pack({**HELLO, "image_bytes": "many"}),
    ],
)
def test_a_hello_that_makes_no_sense(server: CacheServer, bystander: Tier, sent: bytes) -> None:
    with raw(server) as sock, suppress(ConnectionError):  # it is told why, or not
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    check_unharmed(server, bystander)


def test_a_hello_that_trickles_is_not_waited_for(
    server: CacheServer, bystander: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "HELLO_S", 0.2)
    with raw(server) as sock, pytest.raises(ConnectionError):
        sock.sendall(struct.pack("<I", 60_000))
        for _ in range(1000):
            sock.sendall(b" ")
            time.sleep(0.02)
    check_unharmed(server, bystander)


NAME = SHAPE.pack(NAMES[:1])


@pytest.mark.parametrize(
    "request_body",
    [
        b"",
        b"\x00",
        b"\xff" * 40,
        bytes([Operation.ASK]) + b"half a key",
        bytes([Operation.READ]) + NAME[:-1],
        bytes([Operation.PIN]) + b"soon",
        bytes([Operation.DELETE_ROOTS]) + b"acme",
        bytes([Operation.PIN]) + struct.pack("<d", float("nan")) + bytes(32),
        bytes([Operation.READ]) + NAME * (SHAPE.batch + 1),
        bytes([Operation.WRITE]) + SHAPE.pack([NAMES[0]._replace(group=1)]),
    ],
)
def test_a_request_that_makes_no_sense(
    server: CacheServer, bystander: Tier, request_body: bytes
) -> None:
    client = channel(server)
    with pytest.raises(OSError):
        client._wire.send([frame(request_body)], Deadline(PATIENCE_S))
        client._wire.frame(Deadline(PATIENCE_S))
    client.close()
    check_unharmed(server, bystander)


@pytest.mark.parametrize("sent", [b"\x01", struct.pack("<I", 5000) + b"\x03" * 100])
def test_a_client_that_leaves_in_the_middle(
    server: CacheServer, bystander: Tier, sent: bytes
) -> None:
    client = channel(server)
    client._sock.sendall(sent)
    client.close()
    check_unharmed(server, bystander)


def test_a_client_that_leaves_before_the_answer(server: CacheServer, bystander: Tier) -> None:
    for operation in (Operation.READ, Operation.WRITE):
        client = channel(server)
        client._sock.sendall(frame(bytes([operation]) + NAME))
        client.close()
    check_unharmed(server, bystander)


def test_a_client_that_reads_no_answers(server: CacheServer, bystander: Tier) -> None:
    client = channel(server)
    client._sock.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the server waits for room, in this client's own thread
        while True:
            client._sock.sendall(frame(bytes([Operation.ASK]) + bytes(32 * MOST_KEYS)))
    eventually(lambda: server.stats()["host"]["held"] == 0, "a slot is held for good")
    client.close()
    check_unharmed(server, bystander)


def test_the_memory_cannot_be_cut(server: CacheServer, bystander: Tier) -> None:
    """A server that reads behind the end of a file is killed by the system."""
    with raw(server) as sock:
        sock.sendall(pack(HELLO))
        _, [file], _, _ = socket.recv_fds(sock, 1, 1)
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        os.close(file)
    check_unharmed(server, bystander)


@pytest.mark.parametrize("harm", ["image", "head", "other name"])
def test_a_block_that_is_not_what_it_says_is_not_kept(
    server: CacheServer, bystander: Tier, harm: str
) -> None:
    [name], [image] = chain(1, salt=5), filled(1, IMAGE_BYTES, seed=5)
    client = channel(server)
    client.exchange.image(0, IMAGE_BYTES)[:] = np.asarray(image)[:IMAGE_BYTES]
    client.exchange.head(0).data[:] = header(name, image[:IMAGE_BYTES])
    if harm == "other name":
        name = name._replace(tokens=bytes(4 * BLOCK_SIZE))
    else:
        part = client.exchange.head(0) if harm == "head" else client.exchange.image(0, IMAGE_BYTES)
        part[20] ^= 1
    written = client.flags(Operation.WRITE, SHAPE.pack([name]), 1, Deadline(PATIENCE_S))
    assert written == [False]
    assert bystander.contains([name.key]) == [False]
    client.close()
    check_unharmed(server, bystander)


def test_a_complaint_about_a_whole_block_changes_nothing(
    server: CacheServer, bystander: Tier
) -> None:
    client = channel(server)
    client.flags(Operation.CHECK, b"".join(keys(NAMES)), 0, Deadline(PATIENCE_S))
    assert bystander.contains(keys(NAMES)) == [True] * len(NAMES)
    client.close()
    check_unharmed(server, bystander)


def test_a_client_sees_only_what_it_has_the_names_of(server: CacheServer, bystander: Tier) -> None:
    client = channel(server)
    stranger: list[BlockName] = chain(len(NAMES), salt=77)
    body = SHAPE.pack(stranger)
    assert not any(client.flags(Operation.READ, body, len(stranger), Deadline(PATIENCE_S)))
    for at in range(SHAPE.batch):
        assert not client.exchange.image(at, IMAGE_BYTES).any()
        assert not client.exchange.head(at).any()
    client.close()
    check_unharmed(server, bystander)


def test_too_many_connections_are_refused(
    server: CacheServer, bystander: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 6)
    extra = [channel(server) for _ in range(2)]
    with raw(server) as sock:
        assert b"takes no more" in sock.recv(4096)
    for client in extra:
        client.close()
    check_unharmed(server, bystander)


def test_the_largest_question_fits_a_frame() -> None:
    assert 32 * MOST_KEYS + 1 <= MOST_FRAME_BYTES
    for block_size in (1, 16, 1 << 16):
        shape = Shape(block_size, (100,))
        name = BlockName(bytes(32), bytes(32), bytes(32), bytes(4 * block_size))
        assert 1 + shape.batch * len(shape.pack([name])) <= MOST_FRAME_BYTES
