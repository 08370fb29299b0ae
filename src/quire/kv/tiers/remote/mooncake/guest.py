"""The process that runs Mooncake's client.

It is a process of its own because the engine cannot afford what the client does while its master is
silent: to set it up holds the interpreter for minutes, and a call ends after half a minute. Neither
can be stopped; a process can.

The engine passes channels to it by a control socket: each is a socket for messages and memory for
values, and has a thread here that makes one call after the other. All ends with the control socket.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

from mooncake.store import MooncakeDistributedStore

from quire.framing import pack, read_frame_from

_SETUP_S = 60  # the engine gives up much sooner; this is for when the engine is no more


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    store = MooncakeDistributedStore()
    signal.alarm(_SETUP_S)
    control.sendall(pack(store.setup(json.loads(sys.argv[2]))))
    signal.alarm(0)
    while True:
        message, channel, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            break
        threading.Thread(target=_serve, args=(store, *channel), daemon=True).start()
    store.close()
    os._exit(0)  # channels may be in calls whose results no caller waits for


def _serve(store: Any, socket_fd: int, memory_fd: int) -> None:
    memory = mmap.mmap(memory_fd, 0)
    os.close(memory_fd)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        with socket.socket(fileno=socket_fd) as channel, channel.makefile("rb") as requests:
            channel.sendall(pack(_greet(store, start, len(memory))))
            while True:
                request = json.loads(read_frame_from(requests))
                channel.sendall(pack(_do(store, start, **request)))
    except (EOFError, OSError):
        pass  # the engine has closed its end, or did not wait so long
    finally:
        store.unregister_buffer(start)


def _greet(store: Any, start: int, size: int) -> int:
    """Below zero if the channel cannot be used, or the master does not answer."""
    return min(int(store.register_buffer(start, size)), int(store.is_exist("quire:probe")))


def _do(
    store: Any, start: int, do: str, keys: list[str], sizes: list[int], stride: int
) -> list[int]:
    """The store's code for each key; for `get`, how many bytes it found."""
    codes: list[int]
    if do == "exists":
        codes = store.batch_is_exist(keys)
    elif do == "delete":
        codes = store.batch_remove(keys, True)  # even while it is being read
    else:
        move = {"get": store.batch_get_into, "put": store.batch_put_from}[do]
        codes = move(keys, [start + i * stride for i in range(len(keys))], sizes)
    return codes


if __name__ == "__main__":
    main()
