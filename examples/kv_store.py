"""The cache without the engine: one process puts block images, another gets them.

    python examples/kv_store.py /tmp/quire-kv                 through a folder on disk
    python examples/kv_store.py redis://localhost:6379/0      through a Redis server

An engine of your own would do the same with the blocks of its own pool. What is in a block is up to
it: a block is a row of bytes, found again by the tokens it stands for, and those before them.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from quire.kv import ImagePool, KVStore, Namespace, open_store

BLOCK_SIZE = 16  # tokens in a block
BLOCK_BYTES = 64 << 10  # of KV for that many tokens
PROMPT = list(range(1000, 1000 + 10 * BLOCK_SIZE + 5))  # ten blocks; what fills none is not kept

# All that the bytes depend on besides the tokens: who differs in any of it finds nothing of ours.
NAMESPACE = Namespace(
    model="my model",
    dtype="float16",
    kv_dtype="float16",
    block_size=BLOCK_SIZE,
    layout="8 layers, 4 KV heads of 64",
    rope="theta 10,000",
)


def open_at(place: str) -> tuple[ImagePool, KVStore]:
    """A pool of sixteen blocks, and a store for them: host memory, then the folder or server."""
    pool = ImagePool(torch.zeros(16, BLOCK_BYTES, dtype=torch.uint8))
    if "://" in place:
        store = open_store(pool, NAMESPACE, host_cache_bytes="8MiB", remote_cache_url=place)
    else:
        disk = {"ssd_cache_dir": place, "ssd_cache_bytes": "64MiB"}
        store = open_store(pool, NAMESPACE, host_cache_bytes="8MiB", **disk)
    return pool, store


def image(block: int) -> torch.Tensor:
    """What the KV of the prompt's blocks would be."""
    noise = torch.Generator().manual_seed(block)
    return torch.randint(256, (BLOCK_BYTES,), dtype=torch.uint8, generator=noise)


def put(place: str) -> None:
    pool, store = open_at(place)
    with store:  # to leave it closes the store
        blocks = [15, 3, 8, 0, 7, 12, 1, 9, 4, 6]  # wherever the allocator had room
        for at, block in enumerate(blocks):
            pool.images[block] = image(at)
        handle = store.put(PROMPT, blocks)
        if not handle.wait_until_kept(timeout=10):
            sys.exit("The store takes too long.")
        kept = ", ".join(f"{name} ({sum(handle.kept(name))})" for name in store.stats())
        print(f"put:  {handle.num_kept} blocks of {BLOCK_BYTES >> 10} KiB are kept: {kept}")


def get(place: str) -> None:
    pool, store = open_at(place)
    with store:
        match = store.match(PROMPT)
        match.wait(timeout=1)  # a remote store is asked; an engine would do something else now
        blocks = list(range(len(match)))
        full = len(PROMPT) // BLOCK_SIZE
        print(f"get:  {len(match)} of {full} blocks found in {set(match.places)}")
        load = match.load(blocks)
        load.wait(timeout=10)
        same = sum(torch.equal(pool.images[at], image(at)) for at in blocks[: load.num_loaded])
        print(f"get:  {load.num_loaded} loaded, {same} of them byte for byte what was put")
        other = store.match(PROMPT, salt="another tenant")
        other.wait(timeout=1)
        print(f"get:  {len(other)} blocks for another tenant with the same prompt")
        other.drop()
    if same < full:
        sys.exit("Not everything came back.")


def main() -> None:
    if len(sys.argv) == 2:
        put(sys.argv[1])
        sys.stdout.flush()
        # Another process gets them: only the place is shared.
        sys.exit(subprocess.run([sys.executable, __file__, sys.argv[1], "get"]).returncode)
    elif sys.argv[2:] == ["get"]:
        get(sys.argv[1])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
