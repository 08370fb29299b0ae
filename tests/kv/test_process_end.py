"""A process that forgets to close its stores ends in good order; a fork leaves them alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S

from quire.kv import ImagePool, Namespace, open_store

NUM_BLOCKS = 40
IMAGE = 1 << 20

SET_UP = """
import os, sys, time, torch
from quire.kv import ImagePool, Namespace, open_store
from quire.kv.tiers.ssd import tier as ssd
from quire.kv.tiers.ssd.threads import ThreadEngine

def open_at(place):
    pool = ImagePool(torch.ones(64, 1 << 20, dtype=torch.uint8))
    namespace = Namespace("m", "b", "b", 16, "L", "r")
    folder = {"ssd_cache_dir": sys.argv[1] + place, "ssd_cache_bytes": "64MiB"} if place else {}
    return open_store(pool, namespace, host_cache_bytes="64MiB", **folder)

tokens = list(range(640))
"""

FORGETS = """
put = open_at("/uring").put(tokens, range(40))  # nobody has this store any more
ssd.choose_engine = ThreadEngine
threads = open_at("/threads")
threads.put(tokens, range(40)).wait()
host = open_at("")
host.put(tokens, range(40))
raise RuntimeError("the end")
"""

FORKS = """
from quire.errors import KVError
from quire.kv import open_stores

store = open_at("/forked")
put = store.put(tokens, range(40))
child = os.fork()
if not child:
    try:
        store.match(tokens)
    except KVError as error:
        print(error, flush=True)
    store.close()
    sys.exit(7)  # the parent's store is not closed by that
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert put.wait_until_kept(60) and sum(put.kept("ssd")) == 40

open_stores.EXIT_S = 0.2
slow = open_at("/slow")
slow.tiers[0].write = lambda names, images: time.sleep(600)  # a disk that hangs
slow.put(tokens, range(40)).wait()
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SET_UP + script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def blocks_in(folder: Path) -> int:
    pool = ImagePool(torch.zeros(64, IMAGE, dtype=torch.uint8))
    namespace = Namespace("m", "b", "b", 16, "L", "r")
    disk = {"ssd_cache_dir": str(folder), "ssd_cache_bytes": "64MiB"}
    with open_store(pool, namespace, **disk) as store:
        match = store.match(range(640))
        load = match.load(range(len(match)))
        assert load.wait(PATIENCE_S)
        assert pool.images[: load.num_loaded].all()
        return load.num_loaded


def test_stores_that_are_open_at_the_end_write_what_was_put(tmp_path):
    done = run(FORGETS, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("Traceback") and done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("RuntimeError: the end\n")
    assert [blocks_in(tmp_path / name) for name in ("uring", "threads")] == [NUM_BLOCKS] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_fork_leaves_a_store_to_its_parent_and_a_hanging_disk_does_not_hold_up_the_end(tmp_path):
    started = time.monotonic()
    done = run(FORKS, tmp_path)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert done.returncode == 0, done.stderr
    [said, child] = done.stdout.splitlines()
    assert said.endswith("open one in this process, too.") and child == "child 7"
    warnings = [line for line in done.stderr.splitlines() if "fork" not in line]
    assert len(warnings) == 1 and "is dropped" in warnings[0], done.stderr
    assert blocks_in(tmp_path / "forked") == NUM_BLOCKS
