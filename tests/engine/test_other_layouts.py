"""What Quire's own engine has stored, and pools of other layouts: found only by the same name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random

import pytest
import torch
from patience import PATIENCE_S
from pool_layouts import LAYOUTS, Shape, lay_out
from tiny_llm import ids
from tiny_ranks import open_ranks, write_weights

from quire import SamplingParams
from quire.kv import KVStore, Namespace, open_store

SHAPE = Shape(num_layers=3, heads=2, width=8, block_size=8, dtype=torch.float32)
PROMPT = ids(4 * SHAPE.block_size + 1)
PLACES = [5, 2, 4, 0]


@dataclass(frozen=True)
class Stored:
    namespace: Namespace
    rows: set[bytes]  # images of all of the engine's blocks
    folder: str

    def open(self, pool, namespace: Namespace) -> KVStore:
        return open_store(pool, namespace, ssd_cache_dir=self.folder, ssd_cache_bytes="8MiB")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    model = write_weights(tmp_path_factory.mktemp("models") / "model")
    folder = str(tmp_path_factory.mktemp("ssd"))
    llm = open_ranks(model, 1, num_blocks=16, ssd_cache_dir=folder, ssd_cache_bytes="8MiB")
    llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0))
    rows = {row.numpy().tobytes() for row in llm.engine.runner.cache.images}
    namespace = llm.engine.observed.namespace
    llm.close()
    return Stored(namespace, rows, folder)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_same_namespace_finds_the_same_bytes(stored: Stored, kind: str) -> None:
    made = lay_out(kind, SHAPE, 6, Random(0))
    store = stored.open(made.pool, stored.namespace)
    load = store.match(PROMPT).load(made.blocks(PLACES))
    assert load.wait(PATIENCE_S) and load.num_loaded == 4
    images = [image.numpy().tobytes() for image in made.values(PLACES)]
    assert len(set(images)) == 4 and set(images) <= stored.rows
    store.close()


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_a_namespace_that_differs_anywhere_finds_nothing(
    stored: Stored, field: str, tmp_path: Path
) -> None:
    value = getattr(stored.namespace, field)
    changed = {"block_size": 4}.get(field, value + (1 if isinstance(value, int) else " "))
    other = replace(stored.namespace, **{field: changed})
    copy = shutil.copytree(stored.folder, tmp_path / "copy")  # opening may replace what is there
    made = lay_out("layers", replace(SHAPE, block_size=other.block_size), 6, Random(0))
    store = replace(stored, folder=str(copy)).open(made.pool, other)
    assert len(store.match(PROMPT, other.salt)) == 0
    store.close()
