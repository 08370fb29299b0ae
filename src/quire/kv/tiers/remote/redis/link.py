"""Redis' protocol on one open connection.

Nothing large is copied: an image goes from its place to the socket, and from the socket to its
place. Replies come in the order of the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from quire.kv.tiers.remote.client import ClientError, Value
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.wire import Wire

_LONGEST_REPLY = 1 << 20  # of those that are no image
_NONSENSE = "the server's reply is not of Redis' protocol"


class Refusal(ClientError):
    """An error that the server sent as its reply; the connection is as good as before."""

    @property
    def has_moved(self) -> bool:
        """Whether another node of the cluster is meant."""
        return str(self).startswith(("MOVED ", "ASK "))

    @property
    def is_about_the_key(self) -> bool:
        """Whether other keys fare better: this one has moved, or is a list or the like."""
        return self.has_moved or str(self).startswith("WRONGTYPE ")


Reply: TypeAlias = "int | bytes | Refusal | list[Reply] | None"


class Link:
    def __init__(self, wire: Wire, close: Callable[[], None]) -> None:
        self._wire = wire
        self.is_idle, self.close = wire.is_idle, close

    def send(self, commands: Iterable[bytes | memoryview], deadline: Deadline) -> None:
        self._wire.send(commands, deadline)

    def reply(self, deadline: Deadline, depth: int = 4) -> Reply:
        """A reply of any kind, as long as it is small, with lists in lists up to a depth."""
        line = self._wire.line(deadline)
        kind = line[:1]
        if kind not in (b"$", b"*"):
            return _one_line(line)
        size = _integer(line[1:])
        if size < 0:
            return None
        if kind == b"*" and size <= _LONGEST_REPLY and depth:
            return [self.reply(deadline, depth - 1) for _ in range(size)]
        if kind == b"$" and size <= _LONGEST_REPLY:
            text = bytearray(size)
            self._fill([memoryview(text)], deadline)
            return bytes(text)
        raise ClientError(_NONSENSE)

    def replies(self, count: int, deadline: Deadline) -> list[int | bytes | Refusal]:
        """As many replies of one line; thousands of them are the questions of a long prompt."""
        lines = self._wire.lines(count, deadline)
        return [_one_line(line) for line in lines]

    def value(self, value: Value, deadline: Deadline) -> int | Refusal:
        """How long the value is that a GET found, 0 for none.

        Of the right length, it is now in place; of another, it waits for `skip`.
        """
        line = self._wire.line(deadline)
        if line[:1] == b"-":
            return Refusal(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise ClientError(_NONSENSE)
        size = _integer(line[1:])
        if size in (0, len(value)):
            self._fill([value.head, value.image] if size else [], deadline)
        return max(size, 0)

    def skip(self, size: int, deadline: Deadline) -> None:
        """Read a value and forget it."""
        self._wire.skip(size, deadline)
        self._fill([], deadline)

    def _fill(self, targets: list[memoryview], deadline: Deadline) -> None:
        end = bytearray(2)
        for target in [*targets, memoryview(end)]:
            self._wire.fill(target, deadline)
        if end != b"\r\n":
            raise ClientError("a value of the server's does not end where it should")


def command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(_bulk(word.encode()) for word in words)


def key_commands(word: str, keys: Iterable[str]) -> list[bytes]:
    """The same command for each key."""
    start = b"*2\r\n" + _bulk(word.encode())
    return [b"%b$%d\r\n%b\r\n" % (start, len(key), key) for key in map(str.encode, keys)]


def set_command(key: str, value: Value, ttl: float | None) -> list[bytes | memoryview]:
    """A SET whose value is in two places."""
    options = [] if ttl is None else [b"PX", b"%d" % (1000 * ttl)]
    start = b"*%d\r\n" % (3 + len(options)) + _bulk(b"SET") + _bulk(key.encode())
    head = b"$%d\r\n%b" % (len(value), bytes(value.head))
    return [start + head, value.image, b"\r\n" + b"".join(map(_bulk, options))]


def _one_line(line: bytes) -> int | bytes | Refusal:
    kind, rest = line[:1], line[1:]
    if kind == b":":
        return _integer(rest)
    if kind == b"+":
        return rest
    if kind == b"-":
        return Refusal(rest.decode("utf-8", "replace"))
    raise ClientError(_NONSENSE)


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ClientError(_NONSENSE) from None
