"""A real server in a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
from patience import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

START_S = 2 * PATIENCE_S
ADDRESS = re.compile(r"at (http://\S+)")

SETTINGS = ["--dtype", "float32", "--device", "cpu", "--num-blocks", "512"]


ENGINE, SERVER = "quire.engine.process", "quire.api.server.supervised"


class ServerProcess:
    """`quire serve` on a free port; `log` is what it has written so far.

    With a `port`, it is not waited for. `python` is the interpreter, if it is not this one.
    """

    def __init__(
        self,
        *flags: str,
        model: str = "smollm2",
        env: dict[str, str] | None = None,
        port: int = 0,
        python: str | None = None,
    ):
        flags = ("--port", str(port), *SETTINGS, *flags)
        command = [python or sys.executable, "-m", "quire", "serve", model, *flags]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (env or {}),
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://127.0.0.1:{port}" if port else self.wait_until_ready()

    @classmethod
    def tiny(cls, model: str, *flags: str, **options: Any) -> ServerProcess:
        """With random weights, under the name of `tiny`."""
        return cls(
            "--load-format", "dummy", "--served-model-name", "tiny", *flags, model=model, **options
        )

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_until_ready(self) -> str:
        """Its address."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if found := ADDRESS.search(self.log):
                return found[1]
            if self.process.poll() is not None:
                self._reader.join(PATIENCE_S)
                raise RuntimeError(f"quire serve ended with {self.process.returncode}:\n{self.log}")
            time.sleep(0.02)
        raise RuntimeError(f"quire serve did not start:\n{self.log}")

    @property
    def engine_pid(self) -> int:
        """The one child: the engine's process."""
        [pid] = _children(self.process.pid, ENGINE)
        return pid

    @property
    def server_pid(self) -> int:
        """With replicas: the process behind the one that was started."""
        [pid] = _children(self.process.pid, SERVER)
        return pid

    @property
    def replica_pids(self) -> list[int]:
        """The engines, the oldest first."""
        return _children(self.server_pid, ENGINE)

    @property
    def peak_memory(self) -> int:
        """Bytes that the server's process, without the engine's, has held at most."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) * 1024

    # No certificate is verified: to read all known ones takes each client a tenth of a second.
    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False, **options)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=openai.DefaultHttpxClient(verify=False),
        )

    def anthropic(self, key: str = "none", **options: Any) -> anthropic.Anthropic:
        import anthropic  # the other clients' environment has none

        return anthropic.Anthropic(
            base_url=self.url,
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S,
            http_client=anthropic.DefaultHttpxClient(verify=False),
            **options,
        )

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        status = self.process.wait(timeout)
        self._reader.join(PATIENCE_S)
        return status

    def stop(self) -> int:
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.wait()
        finally:
            self.process.kill()


def _children(pid: int, module: str) -> list[int]:
    """Those that run this module: a process may have others, which render templates, say."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if module in _command(child)]


def _command(pid: str) -> str:
    """Empty, if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
