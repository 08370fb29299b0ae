"""A real Mooncake master for tests: started on free ports, stopped, killed, started again."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from patience import eventually
from processes import Killable
from redis_server import free_port

from quire.errors import ConfigError
from quire.kv.tiers.remote.mooncake.url import check_installed


class MooncakeMaster(Killable):
    def __init__(self) -> None:
        self._program = Path(sys.executable).parent / "mooncake_master"
        try:
            check_installed()
        except ConfigError as error:
            pytest.skip(str(error))
        if not self._program.exists():
            pytest.skip("mooncake_master is not installed")
        self.port, self._metrics_port, self._metadata_port = free_port(), free_port(), free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    @property
    def metadata_url(self) -> str:
        """A URL whose clients find each other by the metadata server."""
        metadata = quote(f"http://127.0.0.1:{self._metadata_port}/metadata", safe="")
        return f"{self.url}?metadata={metadata}"

    def start(self) -> None:
        options = {
            "rpc_port": self.port,
            "rpc_address": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "metrics_host": "127.0.0.1",
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self._metadata_port,
        }
        command = [str(self._program), *(f"--{name}={value}" for name, value in options.items())]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(self._listens, "mooncake_master did not start")

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True
