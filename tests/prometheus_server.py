"""A real Prometheus that scrapes one server."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from patience import PATIENCE_S
from redis_server import free_port

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: quire
    static_configs: [{{targets: ["{target}"]}}]
"""


class PrometheusServer:
    def __init__(self, folder: Path, url: str) -> None:
        if shutil.which("prometheus") is None:
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up("prometheus is not installed (scripts/install_test_servers.sh does it)")
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(target=urlparse(url).netloc))
        address = f"127.0.0.1:{free_port()}"
        self._http = httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S)
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=error",
            ],
            cwd=folder,
        )

    def ask(self, query: str) -> list[dict[str, Any]]:
        response = self._http.get("/api/v1/query", params={"query": query})
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            response.raise_for_status()
        answer = response.json()
        assert answer["status"] == "success", f"{query}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def wait_for(self, query: str) -> list[dict[str, Any]]:
        """The answer, once there is one.

        On a busy machine a scrape may come too late, and all series are gone until the next.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if result := self.ask(query):
                    return result
            except httpx.HTTPError:
                pass  # it is still starting: its port is closed, or it says so
            time.sleep(0.1)
        raise AssertionError(f"Prometheus has no answer to {query}")

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(PATIENCE_S)
