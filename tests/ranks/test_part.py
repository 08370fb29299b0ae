"""Which device a rank has, and which numbers of ranks are refused."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.models.checkpoints.dummy import SHAPES
from quire.models.hf_config import read_hf_config
from quire.ranks.rank_model import check_size, device_of

QWEN3 = read_hf_config(SHAPES["qwen3-0.6b"])
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)


def test_every_rank_has_the_next_gpu() -> None:
    assert [device_of(rank, torch.device("cuda", 2)).index for rank in range(4)] == [2, 3, 0, 1]
    assert device_of(1, torch.device("cpu")) == torch.device("cpu")


def accepts(size: int, device: torch.device) -> bool:
    try:
        check_size(size, QWEN3, device)
    except ConfigError:
        return False
    return True


def test_sizes_that_the_machine_and_the_model_allow() -> None:
    """Four GPUs, 16 attention heads, and 8 KV heads, which two ranks may share."""
    assert [size for size in range(1, 33) if accepts(size, GPU)] == [1, 2, 4]
    assert [size for size in range(1, 33) if accepts(size, CPU)] == [1, 2, 4, 8, 16]


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"=8 needs as many GPUs and torch finds 4; lower it\.$"):
        check_size(8, QWEN3, GPU)


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the model's 16 attention heads"):
        check_size(3, QWEN3, GPU)
