"""Starts the process that runs Mooncake's client, gives it channels, and ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from quire.kv.tiers.remote.client import ClientError, ValueShape
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.mooncake.channel import Channel, receive
from quire.kv.tiers.remote.wire import Wire

_GUEST = "quire.kv.tiers.remote.mooncake.guest"
_END_S = 3.0  # to take back the memory that it lends to the store


class Host:
    """One process at most; `setup` is what Mooncake's client is set up with."""

    def __init__(self, setup: dict[str, Any], shape: ValueShape) -> None:
        self._setup, self._shape = setup, shape
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, deadline: Deadline) -> None:
        self.kill()
        # Most outages show here, before a process is started in vain.
        host, port = self._setup["master_server_addr"].rsplit(":", 1)
        with socket.create_connection((host, int(port)), deadline.left()) as master:
            setup = {"local_hostname": master.getsockname()[0]} | self._setup
        self._control, far_end = socket.socketpair()
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _GUEST, str(far_end.fileno()), json.dumps(setup)],
                pass_fds=[far_end.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it writes pages while the master is away
            )
        try:
            if code := receive(Wire(self._control), deadline):
                raise ClientError(f"Mooncake's client could not be set up (its code is {code})")
        except BaseException:
            self.kill()
            raise

    def open_channel(self, deadline: Deadline) -> Channel:
        channel = Channel(self._shape)
        try:
            assert self._control is not None
            channel.hand_over(self._control)
            if (code := channel.receive(deadline)) < 0:
                raise ClientError(f"the Mooncake store does not answer (its code is {code})")
        except BaseException:
            channel.close()
            raise
        return channel

    def end(self) -> None:
        """In order, if others may be using the memory that it lends."""
        self._end(_END_S if self._setup["global_segment_size"] else 0.0)

    def kill(self) -> None:
        self._end(0.0)

    def _end(self, patience: float) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if process is None or control is None:
            return
        with suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)  # the process ends when its control socket does
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        process.kill()
        process.wait()
        control.close()
