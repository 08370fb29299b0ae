"""GGUF sizes and shapes that lie, offsets that overflow, negative counts.

CVE-2026-27940, CVE-2025-53630, CVE-2026-7482, CVE-2026-21869.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

HUGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
OPEN = """
import resource, sys
from pathlib import Path
import torch
from quire.errors import QuireError
from quire.models.checkpoints.gguf_file import GGUFFile
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        file = GGUFFile(Path(path))
        print("opened", len(file.tensors))
    except QuireError as error:
        print("refused", str(error).count(chr(10)))
print("grown", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) // 1024)
"""


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def head(tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def tensor(dims: list[int], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    count = len(dims) if count is None else count
    shape = b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
    return text("a.weight") + struct.pack("<I", count) + shape + struct.pack("<IQ", kind, offset)


def files() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for size in HUGE:
        found[f"tensors {size}"] = head(tensors=size)
        found[f"pairs {size}"] = head(pairs=size)
        found[f"name {size}"] = head(pairs=1) + text("k", size)
        found[f"string {size}"] = head(pairs=1) + text("k") + struct.pack("<I", 8) + text("v", size)
        for kind in (4, 8, 9):
            array = struct.pack("<IIQ", 9, kind, size)
            found[f"array of {kind}, {size}"] = head(pairs=1) + text("k") + array + b"\0" * 64
        found[f"dim {size}"] = head(1) + tensor([size]) + b"\0" * 256
        found[f"dims {size}"] = head(1) + tensor([size, size, 4]) + b"\0" * 256
        found[f"product {size}"] = head(1) + tensor([2**33, 2**31, size]) + b"\0" * 256
        found[f"offset {size}"] = head(1) + tensor([32], offset=size // 32 * 32) + b"\0" * 256
        found[f"quantised {size}"] = head(1) + tensor([size // 32 * 32], kind=8) + b"\0" * 256
    found["negative dim"] = head(1) + tensor([-32]) + b"\0" * 256
    found["many dims"] = head(1) + tensor([1] * 4, count=2**31) + b"\0" * 256
    found["no dims"] = head(1) + tensor([]) + b"\0" * 256
    found["a zero"] = head(1) + tensor([0, 2**63]) + b"\0" * 256
    found["unknown type"] = head(1) + tensor([32], kind=999) + b"\0" * 256
    nested = struct.pack("<II", 9, 9) + struct.pack("<QI", 1, 9) * 5000
    found["arrays in arrays"] = head(pairs=1) + text("k") + nested + b"\0" * 256
    align = text("general.alignment") + struct.pack("<II", 4, 0)
    found["alignment 0"] = head(pairs=1) + align
    return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> list[str]:
    """Each file opened in one process of its own; one word for each, then its memory."""
    folder: Path = tmp_path_factory.mktemp("gguf")
    paths = []
    for at, content in enumerate(files().values()):
        paths.append(folder / f"{at}.gguf")
        paths[-1].write_bytes(content)
    command = [sys.executable, "-c", OPEN, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", files())
def test_each_is_refused_in_one_sentence(opened, name):
    told = opened[list(files()).index(name)]
    may_open = name in ("no dims", "a zero")
    assert told == "refused 0" or (may_open and told.startswith("opened"))


def test_none_of_them_takes_memory(opened):
    word, megabytes = opened[-1].split()
    assert word == "grown" and int(megabytes) < 300
