"""`quire bench embed`, on a model that takes a moment, beside sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pooling_models import write_model

from quire.api import cli
from quire.bench.engine.embed import LEAST_WORDS, random_texts


def test_texts_are_the_same_every_time_and_of_all_lengths() -> None:
    texts = random_texts(200, 40)
    assert texts == random_texts(200, 40)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) == LEAST_WORDS
    assert 35 < max(lengths) <= 40
    assert sorted(lengths)[100] < 20  # more short ones than long ones


def test_beside_sentence_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sentence_transformers import SentenceTransformer, models

    write_model(tmp_path / "bert", "BertModel")
    parts = [models.Transformer(str(tmp_path / "bert")), models.Pooling(24, "mean")]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "model"))
    path = tmp_path / "figures.json"
    line = ["bench", "embed", str(tmp_path / "model"), "--device", "cpu", "--dtype", "float32"]
    flags = ["--compare", "sentence-transformers", "--texts", "9", "--most-words", "20"]
    assert cli.main([*line, *flags, "--repeat", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["by"] for row in found["rows"]] == ["quire", "sentence-transformers"]
    assert found["difference"] < 1e-5
    assert len(found["by CPU time"]["runs"]) == 2
    assert "texts/s" in capsys.readouterr().out
