"""Administration endpoints open by default (LMCache PR #2757)."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

ADMINISTRATION = [
    "/shutdown", "/abort", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache",
    "/reset_mm_cache", "/flush_cache", "/clear", "/collective_rpc", "/debug",
    "/get_server_info", "/update_weights", "/start_profile", "/stop_profile", "/conf", "/loglevel",
    "/set_internal_state", "/configure_logging", "/v1/load_lora_adapter", "/run_script", "/env",
    "/v1/unload_lora_adapter", "/threads", "/cache", "/admin", "/api/admin", "/redoc",
    "/dump", "/scale_elastic_ep",
]  # fmt: skip
OPEN = {
    "/", "/health", "/ping", "/ready", "/load", "/version", "/metrics", "/openapi.json", "/docs",
    "/page/{name}",
}  # fmt: skip


@pytest.mark.parametrize("path", ADMINISTRATION)
def test_there_are_none(tiny_server, path):
    with tiny_server.http() as http:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert http.request(method, path).status_code in (404, 405)


def test_with_keys_only_these_are_open(keyed_server):
    with keyed_server.http() as http:
        document = http.get("/openapi.json")
        if document.status_code == 401:
            document = http.get("/openapi.json", headers={"Authorization": "Bearer sk-one"})
        for path, methods in document.json()["paths"].items():
            for method in methods:
                answer = http.request(method.upper(), path.replace("{", "").replace("}", ""))
                assert answer.status_code == 401 or path in OPEN, (method, path, answer.status_code)
                if path in OPEN:
                    assert method.upper() == "GET"  # nothing that changes anything is open


def test_the_server_is_alone_with_its_machine(tiny_server):
    """On loopback unless told otherwise, and so is whatever its processes say to each other."""
    assert httpx.URL(tiny_server.url).host == "127.0.0.1"
    for pid in (tiny_server.process.pid, tiny_server.engine_pid):
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and owns(pid, inode):
                assert local.startswith("0100007F:"), line


def owns(pid: int, inode: str) -> bool:
    links = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
    found = []
    for link in links:
        try:
            found.append(os.readlink(link))
        except OSError:
            continue
    return f"socket:[{inode}]" in found
