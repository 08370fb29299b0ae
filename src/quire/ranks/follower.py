"""The process of a rank other than 0: builds its shard, then does what rank 0 tells it.

It ends when rank 0 closes its socket, or dies. When it fails itself it says why, and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

from quire.errors import REFUSALS, QuireError, kind_of
from quire.gc_control import keep_for_good
from quire.ranks.follower_copies import FollowerCopies
from quire.ranks.follower_rank import FollowerRank
from quire.ranks.group import PeerLost
from quire.ranks.process import LOST_ITS_PEERS
from quire.ranks.wire import WireClosed, check_version, pack, receive, send

log = logging.getLogger("quire")


def main() -> None:
    # When to end is rank 0's to say; a terminal's Ctrl-C reaches this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders_fd, copies_fd, meeting, memory = map(int, sys.argv[1:])
    orders, copies = socket.socket(fileno=orders_fd), socket.socket(fileno=copies_fd)
    logging.basicConfig(format="%(levelname)s %(message)s")
    try:
        _follow(orders, copies, meeting, memory)
    except WireClosed:
        os._exit(0)
    except PeerLost:
        os._exit(LOST_ITS_PEERS)
    except Exception as error:
        _fail(orders, error)


def _fail(orders: socket.socket, error: Exception) -> None:
    """Say why, and end: threads and groups have nothing to finish, and could wait for others."""
    if not isinstance(error, QuireError):  # a bug, or the machine's fault: say where
        log.error("A rank failed.", exc_info=error)
    with suppress(WireClosed):
        send(orders, pack(failure(error)))
    os._exit(1)


def failure(error: Exception) -> dict[str, str]:
    """What rank 0 is told: why; and of what users are to mend, a model or a setting, the whole
    sentence and its type."""
    said = {"failed": kind_of(error)}
    for kind in REFUSALS:
        if isinstance(error, kind):
            return {**said, "refused": str(error), "kind": kind.__name__}
    return said


def _follow(orders: socket.socket, copies: socket.socket, meeting: int, memory: int) -> None:
    settings, _ = receive(orders)
    check_version(settings)
    follower = FollowerRank(orders, meeting, settings)
    FollowerCopies(copies, memory, follower, partial(_fail, orders)).start()
    follower.build()
    keep_for_good()
    while True:
        follower.obey(*receive(orders))
