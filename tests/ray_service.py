"""A little cluster of Ray's on this machine, and Quire on it; with processes that can be killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from patience import PATIENCE_S
from ray import serve

import quire.serve

PORT = 8765


class RayService:
    """Quire on Ray, once it is up; `name` is the application's."""

    def __init__(self, model: Path, name: str, **settings: Any) -> None:
        """`settings` are those that every deployment of it has."""
        self.model = model
        self.name = name
        self._settings = settings
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=PATIENCE_S)

    def run(self, **settings: Any) -> None:
        """Deploy it; where it is there already, Ray replaces replicas one after the other."""
        app = quire.serve.deployment(
            str(self.model),
            load_format="dummy",
            device="cpu",
            served_model_name="tiny",
            num_blocks=1024,
            **self._settings,
            **settings,
        )
        serve.run(app, name=self.name, route_prefix="/")

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/page/data/replicas").json()["replicas"]
        return found

    def pids(self, deployment: str) -> list[int]:
        """The processes of a deployment's actors."""
        title = f"ray::ServeReplica:{self.name}:{deployment}".encode()
        return sorted(pid for pid in _processes() if _command(pid).startswith(title))

    def engines(self) -> list[int]:
        return [child for pid in self.pids("Replica") for child in _children(pid)]

    def kill_controller(self) -> None:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.kill(controller, no_restart=False)

    def until(self, is_so: Callable[[], bool], patience: float = PATIENCE_S) -> float:
        """How long it took until it was so."""
        began = time.monotonic()
        while not is_so():
            assert time.monotonic() - began < patience, "it did not come about"
            time.sleep(0.1)
        return time.monotonic() - began

    def is_whole(self, count: int) -> bool:
        """Whether so many replicas are up, and no other is there."""
        try:
            states = [each["state"] for each in self.replicas()]
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        return states == ["up"] * count


class Load:
    """Clients that ask again and again, and keep what they got."""

    def __init__(self, service: RayService, prompts: list[str], threads: int = 8) -> None:
        self.answers: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self.slowest = 0.0
        self._service = service
        self._prompts = prompts
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(threads)]

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._service.http.base_url, timeout=PATIENCE_S) as http:
            turn = number
            while not self._is_over:
                prompt = self._prompts[turn % len(self._prompts)]
                turn += 1
                began = time.monotonic()
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                try:
                    answer = http.post("/v1/completions", json=body)
                    if answer.status_code == 200:
                        self.answers.append((prompt, answer.json()["choices"][0]["text"]))
                    else:
                        self.failures.append(f"{answer.status_code} {answer.text[:200]}")
                        time.sleep(0.1)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    time.sleep(0.1)
                self.slowest = max(self.slowest, time.monotonic() - began)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


@contextmanager
def ray_service(model: Path, num_replicas: int, **settings: Any) -> Iterator[RayService]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        service = RayService(model, f"quire{os.getpid()}", **settings)
        service.run(num_replicas=num_replicas)
        service.until(lambda: service.is_whole(num_replicas))
        yield service
    finally:
        serve.shutdown()
        ray.shutdown()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return []
