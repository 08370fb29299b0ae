"""Which device a rank has, and which numbers of ranks are refused."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.dummy import SHAPES
from quire.ranks.part import check_size, device_of

QWEN3 = ModelConfig.from_hf(SHAPES["qwen3-0.6b"])
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)


def test_every_rank_has_the_next_gpu() -> None:
    assert [device_of(rank, torch.device("cuda", 2)).index for rank in range(4)] == [2, 3, 0, 1]
    assert device_of(1, torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sizes_that_the_gpus_and_the_model_allow(size: int) -> None:
    check_size(size, QWEN3, GPU)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"=8 needs as many GPUs and torch finds 4; lower it\.$"):
        check_size(8, QWEN3, GPU)
    check_size(8, QWEN3, torch.device("cpu"))


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the model's 16 attention heads"):
        check_size(3, QWEN3, GPU)
