"""Another client's streams, which go on beside whatever a test does to a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patience import PATIENCE_S
from server_process import ServerProcess


@contextmanager
def bystander(server: ServerProcess, key: str = "none", max_tokens: int = 100) -> Iterator[None]:
    """Streams that run all the while, one after the other, and come out as they do alone."""
    texts: list[str] = []
    leave = threading.Event()

    def follow() -> None:
        with server.openai(key) as client:
            while not leave.is_set():
                stream = client.completions.create(
                    model="tiny",
                    prompt="A bystander",
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                texts.append("".join(part.choices[0].text for part in stream))

    thread = threading.Thread(target=follow)
    thread.start()
    while not texts and thread.is_alive():
        time.sleep(0.01)
    try:
        yield
    finally:
        leave.set()
        thread.join(PATIENCE_S)
    assert len(texts) > 1, "the bystander's stream broke off"
    assert len(set(texts)) == 1, "the bystander was answered otherwise than alone"


def memory_of(pid: int) -> int:
    """The most that a process ever had in memory, in bytes."""
    [line] = [li for li in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in li]
    return int(line.split()[1]) * 1024
