"""Real Redis servers for tests: started on free ports and sockets, killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from patience import eventually
from processes import Killable

PASSWORD = "p@ss/word:1"
QUOTED = "p%40ss%2Fword%3A1"  # as a URL has it
SLOTS = 16384


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer(Killable):
    """One server on a TCP port and on a socket file; `options` are those of its command line."""

    def __init__(
        self, folder: Path, *options: str, password: str | None = None, tls: bool = False
    ) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed (scripts/install_test_servers.sh does it)")
        import redis  # as late as this: tests without a server need no client

        self.folder, self.port = folder, free_port()
        self._short_path = tempfile.TemporaryDirectory(prefix="quire-")  # sockets want one
        self.socket = Path(self._short_path.name) / "redis.sock"
        self.ca_file = folder / "ca.pem"
        # A client that sees what the server holds.
        self.plain = redis.Redis(unix_socket_path=str(self.socket), password=password)
        self._options = [*options, "--unixsocket", str(self.socket), "--dir", str(folder)]
        self._options += ["--port", "0" if tls else str(self.port)]
        self._options += ["--requirepass", password] if password else []
        self._options += self._make_certificates() if tls else []
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            ["redis-server", *self._options, "--save", "", "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )
        eventually(self._answers, "redis-server did not start")

    def kill(self) -> None:
        super().kill()
        self.socket.unlink(missing_ok=True)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _answers(self) -> bool:
        import redis

        try:
            return bool(self.plain.ping())
        except redis.RedisError:
            return False

    def _make_certificates(self) -> list[str]:
        import trustme

        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca_file)
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(self.folder / "server.pem")
        server = str(self.folder / "server.pem")
        return [
            *("--tls-port", str(self.port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", server, "--tls-key-file", server),
            *("--tls-ca-cert-file", str(self.ca_file)),
        ]


class RedisCluster:
    """Three masters and the slots divided among them."""

    def __init__(self, folder: Path) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port"]
        bus_ports = [free_port() for _ in range(3)]
        self.nodes: list[RedisServer] = []
        for at in range(3):
            (folder / str(at)).mkdir()
            node = RedisServer(folder / str(at), *options, str(bus_ports[at]))
            slots = at * SLOTS // 3, (at + 1) * SLOTS // 3 - 1
            node.plain.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
            self.nodes.append(node)
            first = "127.0.0.1", self.nodes[0].port, bus_ports[0]
            node.plain.execute_command("CLUSTER", "MEET", *first)
        eventually(self._is_whole, "the cluster did not form")

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def _is_whole(self) -> bool:
        infos = [node.plain.execute_command("CLUSTER", "INFO") for node in self.nodes]
        return all(
            b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info for info in infos
        )
