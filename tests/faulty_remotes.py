"""Remote stores that fail as they are told to: one class for each kind.

Where there is a server, a `TcpProxy` stands before it. A mount has none: there the calls to the
file system hang, fail and lie.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis_server import RedisServer
from s3_server import S3Server
from shared_cache import ServerProcess
from tcp_proxy import Proxy, TcpProxy, UnixProxy

from quire.kv.tiers.remote.archive.folder import Folder
from quire.kv.tiers.remote.archive.pack import Span


class FaultyRemote(ABC):
    survives_kill = True  # whether what was stored is there when the store is started again
    comes_in_pieces = True  # whether a call that is cut may have brought some blocks already

    @abstractmethod
    def fail(self, mode: str, cut_after: int = 0) -> None:
        """From now on, as `TcpProxy` does in this mode; "pass" is to heal."""

    @abstractmethod
    def url(self, timeout: float) -> str:
        """The way on which it fails."""

    def direct_url(self, timeout: float) -> str:
        """The way without a proxy, for when the store itself fails."""
        return self.url(timeout)

    @abstractmethod
    def vanish(self) -> None:
        """It cannot be reached, until `come_back`."""

    @abstractmethod
    def come_back(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def hang_next_call(self) -> None:
        """The next call gets no answer; all others do."""

    @abstractmethod
    def close(self) -> None: ...


class Server(Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class BehindProxy(FaultyRemote):
    """A server that is reached over a socket."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.proxy, self.server = proxy, server

    def fail(self, mode: str, cut_after: int = 0) -> None:
        self.proxy.mode, self.proxy.cut_after = mode, cut_after

    def vanish(self) -> None:
        self.proxy.vanish()

    def come_back(self) -> None:
        self.proxy.listen()

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def hang_last_connection(self) -> None:
        accepted = self.proxy.accepted
        self.proxy.spared = set(range(accepted)) - {accepted - 1}
        self.proxy.mode = "black hole"

    def close(self) -> None:
        self.proxy.vanish()
        self.server.kill()


class FaultyRedis(BehindProxy):
    survives_kill = False

    def __init__(self, folder: Path) -> None:
        server = RedisServer(folder)
        super().__init__(server, TcpProxy(server.port))
        self._url = server.url

    def url(self, timeout: float) -> str:
        return f"redis://127.0.0.1:{self.proxy.port}/0?timeout={timeout}"

    def direct_url(self, timeout: float) -> str:
        return f"{self._url}?timeout={timeout}"

    def hang_next_call(self) -> None:
        self.hang_last_connection()  # it is lent first


class FaultySharedCache(BehindProxy):
    """The proxy passes on the memory of the connections."""

    comes_in_pieces = False

    def __init__(self, folder: Path) -> None:
        sizes = ["--ssd-cache-bytes", "4MiB", "--host-cache-bytes", "4MiB"]
        server = ServerProcess(folder, *sizes)
        proxy = UnixProxy(folder / "proxy", server.socket)
        proxy.corrupt_every, proxy.trickle_s = 4, 0.2  # answers are short
        super().__init__(server, proxy)
        self._direct, self._proxied = server.socket, proxy.path

    def fail(self, mode: str, cut_after: int = 0) -> None:
        super().fail(mode, cut_after=0)  # images are not in the stream

    def url(self, timeout: float) -> str:
        return f"quire://{self._proxied}?timeout={timeout}"

    def direct_url(self, timeout: float) -> str:
        return f"quire://{self._direct}?timeout={timeout}"

    def hang_next_call(self) -> None:
        self.hang_last_connection()  # it is lent first


class FaultyBucket(BehindProxy):
    def __init__(self, folder: Path) -> None:
        server = S3Server(folder)
        super().__init__(server, TcpProxy(server.port))
        self._url = server.url

    def url(self, timeout: float) -> str:
        return f"{self._url(self.proxy.port)}&timeout={timeout}"

    def direct_url(self, timeout: float) -> str:
        return f"{self._url()}&timeout={timeout}"

    def hang_next_call(self) -> None:
        self.proxy.vanish()  # connections are kept open: without them the next call makes a new one
        self.proxy.listen()
        self.proxy.hung = {self.proxy.accepted}


class FaultyMount(FaultyRemote):
    """A folder, and a stand-in for each call by which the archive reaches it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mode, self._cut_after = "pass", 0
        self._folder, self._away = folder / "mount", folder / "away"
        self._folder.mkdir()
        self._hanging = 0  # calls that hang, whatever the mode
        for name in ("check", "names", "write"):
            monkeypatch.setattr(Folder, name, self._gated(getattr(Folder, name)))
        monkeypatch.setattr(Folder, "read", self._failing_read(Folder.read))

    def fail(self, mode: str, cut_after: int = 0) -> None:
        self._mode, self._cut_after = mode, cut_after

    def url(self, timeout: float) -> str:
        return f"file://{self._folder}?timeout={timeout}"

    def vanish(self) -> None:
        os.rename(self._folder, self._away)

    def come_back(self) -> None:
        os.rename(self._away, self._folder)

    kill, start = vanish, come_back

    def pause(self) -> None:
        self.fail("black hole")

    def resume(self) -> None:
        self.fail("pass")

    def hang_next_call(self) -> None:
        self._hanging = 1

    def close(self) -> None:
        self._mode, self._hanging = "pass", -1

    def _gated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any) -> Any:
            self._wait_or_fail()
            return call(*args)

        return gated

    def _failing_read(self, read: Callable[..., Iterator[memoryview]]) -> Callable[..., Any]:
        def failing(folder: Folder, name: str, spans: Sequence[Span]) -> Iterator[memoryview]:
            self._wait_or_fail()
            passed = 0
            for data in read(folder, name, spans):
                passed += len(data)
                if self._mode == "cut" and passed > self._cut_after:
                    raise OSError(errno.ESTALE, "Stale file handle")
                if self._mode == "corrupt":
                    data[2048::4096] = bytes(byte ^ 1 for byte in data[2048::4096])
                yield data

        return failing

    def _wait_or_fail(self) -> None:
        if self._hanging == 1:
            self._hanging = 2
            while self._hanging == 2:
                time.sleep(0.01)
        while self._mode in ("black hole", "trickle"):
            time.sleep(0.01)
        if self._mode == "reset":
            raise OSError(errno.EIO, "Input/output error")
