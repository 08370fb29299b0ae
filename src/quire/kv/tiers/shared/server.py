"""The server: listens on a socket that only its user can open, and has a thread a connection."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, QuireError
from quire.kv.tiers.memory import check_free
from quire.kv.tiers.shared.cache import SharedCache
from quire.kv.tiers.shared.protocol import ProtocolError, Shape
from quire.kv.tiers.shared.session import Session
from quire.kv.tiers.shared.settings import CacheSettings
from quire.kv.tiers.ssd.files import is_still_there

log = logging.getLogger("quire")

MOST_CONNECTIONS = 128  # an engine has four
CLOSE_S = 10.0


class CacheServer:
    """Serves from the moment that it is made until it is closed."""

    def __init__(self, path: Path, settings: CacheSettings) -> None:
        check_free(settings.host_cache_bytes)
        self.path = path
        self._settings = settings
        self._cache: SharedCache | None = None
        self._is_shape_whole = False  # whether each KV group's size is known
        self._opening = threading.Lock()
        self._closing = False
        self._sessions: dict[Session, threading.Thread] = {}
        self._changed = threading.Lock()
        self._lock_file, self._listener = _listen(path)
        try:
            # A large folder takes its time, and one that cannot be used is known at the start.
            if found := settings.shape_on_disk():
                self._cache = settings.open(found)
        except BaseException:
            self._stop_listening()
            raise
        self._thread = threading.Thread(target=self._accept, name="quire accept", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"quire://{self.path}"

    def cache_for(self, shape: Shape) -> SharedCache:
        """The first engine decides for which blocks the cache is, if its folder has not."""
        with self._opening:
            if self._cache is None:
                try:
                    self._cache, self._is_shape_whole = self._settings.open(shape), True
                except OSError as error:  # which is not that the client has gone
                    raise ConfigError(f"the server cannot open its cache ({error})") from error
            cache = self._cache
            if not self._is_shape_whole and _is_same_at_most(cache.shape, shape):
                cache.shape = shape
                cache.ssd.group_bytes, self._is_shape_whole = shape.image_bytes, True
            if cache.shape != shape:
                raise ProtocolError(
                    f"the server's cache is for blocks of {_shown(cache.shape)}, not of "
                    f"{_shown(shape)}; start another server with another folder for this model"
                )
            return cache

    def stats(self) -> dict[str, Any]:
        with self._changed:
            connections = len(self._sessions)
        return {"connections": connections, **(self._cache.stats() if self._cache else {})}

    def close(self) -> None:
        """Let what is under way end, within a bound, and close the folder."""
        if self._closing:
            return
        self._stop_listening()
        self._thread.join(CLOSE_S)
        with self._changed:
            running = dict(self._sessions)
        for session in running:
            session.hang_up()
        deadline = time.monotonic() + CLOSE_S
        for thread in running.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._cache is not None:
            self._cache.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("The cache's server could not accept a client (%s).", error)
                time.sleep(0.1)  # out of file descriptors, perhaps: some will be closed
                continue
            session = Session(sock, self)
            thread = threading.Thread(
                target=self._serve, args=(session,), name="quire cache client", daemon=True
            )
            with self._changed:
                is_full = len(self._sessions) >= MOST_CONNECTIONS
                if not is_full:
                    self._sessions[session] = thread
            if is_full:
                session.refuse(f"the server has {MOST_CONNECTIONS} connections and takes no more")
            else:
                thread.start()

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        except (OSError, EOFError):
            pass  # the client has gone
        except QuireError as error:
            log.warning("A client of the shared cache was sent away: %s.", str(error).rstrip("."))
        except Exception:  # a bug that one client meets must not end the others
            log.exception("A client of the shared cache was sent away.")
        finally:
            session.close()
            with self._changed:
                del self._sessions[session]

    def _stop_listening(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock_file)


def _listen(path: Path) -> tuple[int, socket.socket]:
    """The socket, and a file whose lock says that this process is the one that serves there."""
    lock = -1
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_still_there(lock, Path(f"{path}.lock")):
            os.close(lock)
            return _listen(path)
        if path.is_socket():
            path.unlink()  # of a server that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)  # before the first connection, which needs listen()
        listener.listen()
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"Another server serves at {path}; give another --socket.") from None
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        raise ConfigError(f"{path} cannot be a socket ({error}); give another --socket.") from None
    return lock, listener


def _is_same_at_most(found: Shape, shape: Shape) -> bool:
    return (found.block_size, found.most_bytes) == (shape.block_size, shape.most_bytes)


def _shown(shape: Shape) -> str:
    sizes = " and ".join(f"{size:,}" for size in shape.image_bytes)
    return f"{shape.block_size} tokens and {sizes} bytes"
