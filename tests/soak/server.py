"""Whether a server's memory grows: `make soak-server`; the exit status is 1 if it does.

Requests of every kind, several at a time, with texts that were not sent before: what each of the
two processes holds after all of them is compared to what it held after the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from server_process import ServerProcess
from tiny_model import write_tiny_model

from quire.bench.serve.prompts import WORDS
from quire.models.checkpoints import demo

AT_ONCE = 16
LEAVES_AFTER = 3  # events of a stream that is not read to its end
TENTHS = 10
ALLOWED = 0.02  # of growth from the first tenth to the last
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        model = write_tiny_model(Path(folder), demo.fetch())
        server = ServerProcess.tiny(str(model), "--no-log-requests")
        try:
            first, *_, last = asyncio.run(_sizes(server, options.requests))
        finally:
            server.stop()
    grown = {name: last[name] / first[name] - 1 for name in first}
    print("soak: " + ", ".join(f"{name} {share:+.2%}" for name, share in grown.items()))
    return int(max(grown.values()) > ALLOWED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak.server", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    return parser.parse_args()


async def _sizes(server: ServerProcess, requests: int) -> list[dict[str, int]]:
    """Bytes in memory of each process, after every tenth of the requests."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:

        async def send(numbers: Iterator[int]) -> None:
            for number in numbers:
                await _ask(session, number)

        sizes = []
        for tenth in range(TENTHS):
            numbers = iter(range(tenth * requests // TENTHS, (tenth + 1) * requests // TENTHS))
            await asyncio.gather(*(send(numbers) for _ in range(AT_ONCE)))
            pids = {"server": server.process.pid, "engine": server.engine_pid}
            sizes.append({name: resident(pid) for name, pid in pids.items()})
            shown = ", ".join(f"{name} {size:,} bytes" for name, size in sizes[-1].items())
            print(f"after {(tenth + 1) * requests // TENTHS:,} requests: {shown}", flush=True)
        return sizes


async def _ask(session: aiohttp.ClientSession, number: int) -> None:
    r = random.Random(number)
    text = f"{number} " + " ".join(r.choices(WORDS, k=r.randint(4, 60)))
    body: dict[str, Any] = {"max_tokens": r.randint(1, 24), "stream": r.random() < 0.5}
    if r.random() < 0.2:
        body |= {"logprobs": 3}
    if r.random() < 0.1:
        body |= {"guided_json": SCHEMA}
    if r.random() < 0.1:
        body |= {"temperature": -1}  # refused
    path = "/v1/completions"
    if r.random() < 0.5:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": text}]}
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 3}
    else:
        body |= {"prompt": text}
    async with session.post(path, json=body) as response:
        assert response.status == (400 if body.get("temperature") == -1 else 200), response.status
        if body["stream"] and r.random() < 0.2:
            for _ in range(LEAVES_AFTER):
                await response.content.readline()
            response.close()
        else:
            await response.read()


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
