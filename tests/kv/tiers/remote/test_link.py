"""Redis' protocol, read as it comes: in any pieces, right or wrong, before the deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from quire.kv.tiers.remote.client import ClientError, Value
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.redis.link import Link, Refusal, command, key_commands, set_command
from quire.kv.tiers.remote.wire import Wire


class Peer:
    """A link, and the server's end of it."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair()
        self.link = Link(Wire(near), near.close)

    def close(self) -> None:
        self.link.close()
        self.far.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def value(head: int, image: int) -> Value:
    return Value(memoryview(bytearray(head)), memoryview(bytearray(image)))


def test_commands() -> None:
    assert command("GET", "é") == b"*2\r\n$3\r\nGET\r\n$2\r\n\xc3\xa9\r\n"
    assert key_commands("GET", ["é", "k"]) == [command("GET", "é"), command("GET", "k")]
    parts = set_command("k", Value(memoryview(b"head"), memoryview(b"image")), ttl=None)
    assert b"".join(parts) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$9\r\nheadimage\r\n"
    parts = set_command("k", Value(memoryview(b"h"), memoryview(b"i")), ttl=1.5)
    assert b"".join(parts).endswith(b"$2\r\nhi\r\n$2\r\nPX\r\n$4\r\n1500\r\n")


def test_replies_of_all_kinds(peer: Peer) -> None:
    peer.far.sendall(b"+OK\r\n:-7\r\n$-1\r\n$3\r\na\r\n\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n-ERR no\r\n")
    replies = [peer.link.reply(Deadline(PATIENCE_S)) for _ in range(6)]
    assert replies[:5] == [b"OK", -7, None, b"a\r\n", [1, [b""]]]
    assert isinstance(replies[5], Refusal) and str(replies[5]) == "ERR no"
    assert peer.link.is_idle()


@pytest.mark.parametrize("step", [1, 5, 1000, 100_000])
def test_many_short_replies_in_any_pieces(peer: Peer, step: int) -> None:
    stream = b"".join(b":%d\r\n" % number for number in range(9000)) + b"-NO\r\n+YES\r\n:7\r\n"
    threading.Thread(
        target=lambda: [
            peer.far.sendall(stream[at : at + step]) for at in range(0, len(stream), step)
        ]
    ).start()
    replies = peer.link.replies(9002, Deadline(PATIENCE_S))
    assert replies[:9000] == list(range(9000))
    assert isinstance(replies[9000], Refusal) and replies[9001] == b"YES"
    assert peer.link.reply(Deadline(PATIENCE_S)) == 7 and peer.link.is_idle()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 40_000])
def test_values_in_any_pieces(peer: Peer, step: int) -> None:
    head, image = b"h" * 100, bytes(range(250)) * 40
    found = b"$%d\r\n" % (len(head) + len(image)) + head + image + b"\r\n"
    stream = found + b"$-1\r\n" + b"$0\r\n\r\n" + found + b":5\r\n"

    def send() -> None:
        for at in range(0, len(stream), step):
            peer.far.sendall(stream[at : at + step])

    sender = threading.Thread(target=send)
    sender.start()
    places = [value(len(head), len(image)) for _ in range(4)]
    sizes = [peer.link.value(place, Deadline(PATIENCE_S)) for place in places]
    assert sizes == [len(head) + len(image), 0, 0, len(head) + len(image)]
    assert (bytes(places[0].head), bytes(places[3].image)) == (head, image)
    assert peer.link.reply(Deadline(PATIENCE_S)) == 5
    sender.join()


def test_a_value_of_another_length_can_be_passed_over(peer: Peer) -> None:
    peer.far.sendall(b"$70000\r\n" + bytes(70_000) + b"\r\n:1\r\n")
    place = value(3, 4)
    assert peer.link.value(place, Deadline(PATIENCE_S)) == 70_000
    peer.link.skip(70_000, Deadline(PATIENCE_S))
    assert not any(place.head) and peer.link.reply(Deadline(PATIENCE_S)) == 1


def test_lists_in_lists_have_an_end(peer: Peer) -> None:
    peer.far.sendall(b"*1\r\n" * 10_000)
    with pytest.raises(ClientError):
        peer.link.reply(Deadline(PATIENCE_S))


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_nonsense_is_an_error_or_a_reply_and_never_a_wait(noise: bytes, as_value: bool) -> None:
    peer = Peer()
    peer.far.sendall(noise)
    peer.far.shutdown(socket.SHUT_WR)
    try:
        for _ in range(10):
            if as_value:
                peer.link.value(value(2, 3), Deadline(PATIENCE_S))
            else:
                peer.link.reply(Deadline(PATIENCE_S))
    except (ClientError, OSError):
        pass
    finally:
        peer.close()


@pytest.mark.parametrize("start", [b"", b"$5", b"$5\r\n", b"$5\r\nhe", b"$5\r\nhello"])
def test_trickled_bytes_do_not_move_the_deadline(peer: Peer, start: bytes) -> None:
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            peer.far.sendall(b"1")

    peer.far.sendall(start.replace(b"5", b"500000"))
    sender = threading.Thread(target=trickle)
    sender.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        peer.link.value(value(100, 499_900), Deadline(0.2))
    assert 0.15 < time.monotonic() - started < PATIENCE_S
    stop.set()
    sender.join()


def test_a_peer_that_does_not_read_does_not_move_it_either(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.link.send([memoryview(bytes(50 << 20))], Deadline(0.2))


def test_a_link_with_something_to_read_is_not_idle(peer: Peer) -> None:
    assert peer.link.is_idle()
    peer.far.sendall(b"+")
    assert not peer.link.is_idle()


def test_a_link_whose_server_left_is_not_idle(peer: Peer) -> None:
    peer.far.close()
    assert not peer.link.is_idle()
