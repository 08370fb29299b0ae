"""Two models that are almost alike use one cache, and neither is given the other's KV."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from patience import PATIENCE_S
from tiny_llm import CONFIG
from tiny_ranks import SHAPE, write_weights

from quire import LLM, SamplingParams
from quire.engine.schedule.no_tiers import NO_TIERS
from quire.models.source import open_model, read_whole

EMBEDDING = "model.embed_tokens.weight"
OTHER_ROWS = range(140, 147)  # seven of 199: neither the first 4 KiB nor the middle of the matrix
PROMPT = [*OTHER_ROWS] * 12
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def write_model(path: Path, kind: str) -> Path:
    if kind == "folder":
        return write_weights(path)
    tensors = read_whole(open_model(str(write_weights(path.with_suffix(".folder")))))
    return tiny_gguf.write_gguf(path.with_suffix(".gguf"), CONFIG | SHAPE, tensors)


def copy_with_other_rows(model: Path) -> Path:
    """A copy of a model in which seven tokens mean something else."""
    copy = model.with_stem("other")
    shutil.copytree(model, copy) if model.is_dir() else shutil.copy(model, copy)
    embedding: Any = dict(open_model(str(copy)).tensors())[EMBEDDING]
    row = embedding.shape[1] * embedding.block_bytes
    with embedding.file.path.open("r+b") as file:
        for i in OTHER_ROWS:
            file.seek(embedding.start + (i - 40) * row)
            content = file.read(row)
            file.seek(embedding.start + i * row)
            file.write(content)
    return copy


def answer(model: Path, **settings: Any) -> tuple[list[int], dict[str, int]]:
    """The answer, and how many tokens of its prompt came from which tier."""
    basics = {"dtype": "float32", "device": "cpu", "use_tqdm": False, "num_blocks": 64}
    with LLM(str(model), block_size=8, **basics | settings) as llm:
        output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        if llm.engine.scheduler.tiering is not NO_TIERS:
            assert llm.engine.scheduler.tiering.store.flush(PATIENCE_S)
        return output.outputs[0].token_ids, output.cached_tokens_by_tier


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_with_seven_other_embedding_rows_shares_no_kv(tmp_path: Path, kind: str) -> None:
    first = write_model(tmp_path / "first", kind)
    other = copy_with_other_rows(first)
    own, others_own = answer(first)[0], answer(other)[0]
    assert own != others_own  # or sharing would not show
    tier = {"ssd_cache_dir": str(tmp_path / "ssd"), "ssd_cache_bytes": "64MiB"}
    assert answer(first, **tier) == (own, {})
    assert answer(other, **tier) == (others_own, {})
    again, tiers = answer(first, **tier)
    assert again == own and tiers["ssd"] > 0


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_copy_of_a_model_finds_what_the_model_kept(tmp_path: Path, kind: str) -> None:
    first = write_model(tmp_path / "first", kind)
    copy = first.with_stem("copy")
    shutil.copytree(first, copy) if first.is_dir() else shutil.copy(first, copy)
    tier = {"ssd_cache_dir": str(tmp_path / "ssd"), "ssd_cache_bytes": "64MiB"}
    own, _ = answer(first, **tier)
    again, tiers = answer(copy, **tier)
    assert again == own and tiers["ssd"] > 0
