"""Encoders and decoders that pool, against transformers: each text there by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooling_models import ENCODERS, SHAPES, write_model

from quire.errors import ModelError
from quire.models.pooling.open import open_pooling
from quire.runner.device import choose_device
from quire.runner.pooling_runner import PoolingRunner
from quire.runner.text_batch import TextBatch

IDS = [[5, 9], [7], [4, 8, 15, 16, 23, 39], [11, 12], list(range(3, 35))]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return choose_device(request.param)


def run(
    folder: Path,
    device: torch.device,
    task: str = "auto",
    seconds: list[int | None] | None = None,
) -> np.ndarray[Any, Any]:
    source = open_pooling(str(folder), task, True, False)
    assert source is not None
    model = source.build(torch.float32, device, progress=False, dummy=False)
    runner = PoolingRunner(model, device, torch.float32)
    return runner.launch(TextBatch.of(IDS, seconds or [])).wait()


def close(found: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def hidden(model: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in IDS]


@pytest.mark.parametrize("family", SHAPES)
def test_a_body_alone(family: str, tmp_path: Path, device: torch.device) -> None:
    model = write_model(tmp_path, f"{family}Model")
    states = hidden(model)
    expected = [s.mean(0) if family in ENCODERS else s[-1] for s in states]
    close(run(tmp_path, device), torch.stack(expected))


@pytest.mark.parametrize("family", SHAPES)
def test_classes(family: str, tmp_path: Path, device: torch.device) -> None:
    model = write_model(tmp_path, f"{family}ForSequenceClassification", num_labels=3)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0] for ids in IDS]
    close(run(tmp_path, device), torch.stack(expected))


def test_the_second_text_of_a_pair_has_its_own_type(tmp_path: Path) -> None:
    model = write_model(tmp_path, "BertForSequenceClassification", num_labels=1)
    seconds = [1, None, 3, 2, 20]
    with torch.no_grad():
        expected = []
        for ids, second in zip(IDS, seconds, strict=True):
            begins = len(ids) if second is None else second
            types = torch.tensor([[int(i >= begins) for i in range(len(ids))]])
            expected.append(model(torch.tensor([ids]), token_type_ids=types).logits[0])
    close(run(tmp_path, torch.device("cpu"), seconds=seconds), torch.stack(expected))


@pytest.mark.parametrize("tied", [True, False])
def test_yes_or_no(tied: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    yes, no = 12, 13  # where the tokenizer has these words
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in IDS])
    expected = (logits[:, yes] - logits[:, no])[:, None]
    close(run(tmp_path, torch.device("cpu"), "score"), expected)


def test_a_model_that_generates_may_embed(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    assert open_pooling(str(tmp_path), "auto", True, False) is None
    expected = [states[-1] for states in hidden(model.model)]
    close(run(tmp_path, torch.device("cpu"), "embed"), torch.stack(expected))


def test_windows_reach_as_far_as_they_do_elsewhere(tmp_path: Path) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = write_model(tmp_path, "Qwen3Model", **windowed)
    expected = [states[-1] for states in hidden(model)]
    close(run(tmp_path, torch.device("cpu")), torch.stack(expected))


def test_tensors_of_a_head_that_is_not_used_are_left_out(tmp_path: Path) -> None:
    model = write_model(tmp_path, "BertForMaskedLM")
    expected = [states.mean(0) for states in hidden(model.bert)]
    close(run(tmp_path, torch.device("cpu")), torch.stack(expected))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "xielu"}, "activation"),
        ({"position_embedding_type": "relative_key"}, "positions are"),
        ({"num_attention_heads": 5}, "evenly"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"intermediate_size": 57}, "not those"),
    ],
)
def test_what_would_be_wrong_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=says):
        run(tmp_path, torch.device("cpu"))


def test_a_task_that_a_model_has_no_head_for(tmp_path: Path) -> None:
    write_model(tmp_path, "BertModel")
    with pytest.raises(ModelError, match="no head for task='classify'"):
        open_pooling(str(tmp_path), "classify", True, False)
