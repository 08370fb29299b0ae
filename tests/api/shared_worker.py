"""A process that uses a shared cache until it is killed: an engine, or `quire.kv` alone.

    python shared_worker.py engine URL MODEL       a prompt a line on stdin, its answer on stdout
    python shared_worker.py library URL BYTES      puts and loads blocks, and checks each byte

An engine's rates are not measured, so that it loads what it finds: for a model so small it would
rather compute.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from patience import PATIENCE_S, eventually
from tiny_ranks import open_ranks

from quire import SamplingParams
from quire.kv import ImagePool, Namespace, open_store

BLOCK_SIZE = 8
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


def engine(url: str, model: str) -> None:
    with open_ranks(Path(model), 1, num_blocks=200, remote_cache_url=url) as llm:
        store = llm.engine.scheduler.tiering.store
        store.rates.observe = lambda *seen: None
        [remote] = store.tiers
        say("ready")
        for line in sys.stdin:
            job = json.loads(line)
            if job["calm"]:
                eventually(lambda: remote.stats()["breaker"] == "closed")
            [output] = llm.generate([job["prompt"]], PARAMS, use_tqdm=False)
            assert store.flush(PATIENCE_S)
            say({"ids": output.outputs[0].token_ids, "from": output.cached_tokens_by_tier})


def library(url: str, block_bytes: str) -> None:
    pool = ImagePool(torch.zeros(8, int(block_bytes), dtype=torch.uint8))
    namespace = Namespace("a model", "float32", "float32", BLOCK_SIZE, "any", "none")
    store = open_store(pool, namespace, remote_cache_url=url)
    dice = random.Random()
    say("ready")
    while True:
        prompt = [dice.randrange(20), *range(4 * BLOCK_SIZE - 1)]
        right = torch.randint(
            256, (4, pool.block_bytes), dtype=torch.uint8, generator=_noise(prompt[0])
        )
        match = store.match(prompt)
        match.wait(PATIENCE_S)
        load = match.load(range(len(match)))
        load.wait(PATIENCE_S)
        loaded = load.num_loaded
        assert torch.equal(pool.images[:loaded], right[:loaded]), "wrong bytes"
        pool.images[4:] = right
        store.put(prompt, [4, 5, 6, 7]).wait_until_kept(PATIENCE_S)
        say(loaded)
        time.sleep(0.05)


def _noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    {"engine": engine, "library": library}[sys.argv[1]](*sys.argv[2:])
