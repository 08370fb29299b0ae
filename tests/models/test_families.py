"""Every family against transformers: prefill and each decode step, whole, in chunks, together."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import effort
from families import CASES, DECODED, GROUPS, MIXTURES, PROMPT, Oracle
from paged import PagedModel

from quire.kernels.backend import Backend, backend_for
from quire.kernels.cpu import CpuBackend
from quire.kernels.reference import ReferenceBackend
from quire.models.causal_lm import CausalLM
from quire.models.source import build_model, open_model, shapes


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Oracle(case, tmp_path_factory.mktemp(case)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def load(oracle: Oracle, device: torch.device, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(open_model(str(oracle.folder)), dtype, device, progress=False)


@pytest.mark.parametrize("case", CASES)
def test_prefill_and_every_decode_step(case: str, oracles: Any, device: torch.device) -> None:
    oracle = oracles(case)
    paged = PagedModel(load(oracle, device), backend_for(device), block_size=16)
    oracle.check(paged.step({"a": oracle.ids[:PROMPT]})["a"], 0)
    for position in range(PROMPT, PROMPT + DECODED):
        oracle.check(paged.step({"a": [oracle.ids[position]]})["a"], position)


@pytest.mark.parametrize("case", CASES)
def test_odd_chunks_beside_another_sequence(case: str, oracles: Any, device: torch.device) -> None:
    oracle = oracles(case)
    paged = PagedModel(load(oracle, device), backend_for(device), block_size=4)
    done = {"chunked": 0, "other": 0}
    for sizes in ((1, 17), (7, 1), (13, 1), (2, 30), (27, 1), (1, 1), (1, 19)):
        work = {
            name: oracle.ids[done[name] : done[name] + size]
            for name, size in zip(done, sizes, strict=True)
        }
        for name, logits in paged.step(work).items():
            oracle.check(logits, done[name])
            done[name] += len(logits)
    assert done == {"chunked": 52, "other": 70}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_of_each_kind(case: str, oracles: Any) -> None:
    """The thin model that kernels are compiled with computes what the whole one does."""
    config = open_model(str(oracles(case).folder)).config
    thin = config.with_one_layer_of_each_kind()
    whole, layers = shapes(config), len(shapes(thin).model.layers)
    assert 1 <= layers == thin.num_layers <= len(whole.model.layers) == config.num_layers
    for name in config.by_layer:
        assert set(getattr(thin, name)) == set(getattr(config, name))


def check_every_step(oracle: Oracle, backend: Backend, prompt: int, decoded: int) -> None:
    paged = PagedModel(load(oracle, torch.device("cpu")), backend, block_size=8)
    oracle.check(paged.step({"a": oracle.ids[:prompt]})["a"], 0)
    for position in range(prompt, prompt + decoded):
        oracle.check(paged.step({"a": [oracle.ids[position]]})["a"], position)


@pytest.mark.diagonal
@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend()], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", [*GROUPS, "llama-grouped", "qwen3-layer-types"])
def test_backends_without_kernels(case: str, backend: Backend, oracles: Any) -> None:
    check_every_step(oracles(case), backend, PROMPT, DECODED)


INTERPRETED = ["gemma2", "gemma3", "qwen2-moe", "gpt-oss", "deepseek-v3"]


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU (its kernels are tested there)",
)
@pytest.mark.parametrize("case", effort(INTERPRETED, sorted({*INTERPRETED, *MIXTURES})))
def test_interpreted_kernels(case: str, tmp_path: Path) -> None:
    """Windows, caps, rotations, norms of heads, weights above one, experts, latents; a GPU tests
    all."""
    from quire.kernels.triton import TritonBackend

    oracle = Oracle(case, tmp_path, num_hidden_layers=2, sliding_window_pattern=2)
    check_every_step(oracle, TritonBackend(), prompt=20, decoded=1)


@pytest.mark.parametrize(
    "case", ["llama-bias", "mistral-window", "qwen3-window", "olmo2", "gemma3"]
)
def test_half_precision_stays_close(case: str, oracles: Any, device: torch.device) -> None:
    """Of models without experts: where rounding turns a near tie, a token goes to another one."""
    oracle = oracles(case)
    paged = PagedModel(load(oracle, device, torch.float16), backend_for(device))
    logits = paged.step({"a": oracle.ids})["a"]
    torch.testing.assert_close(logits.cpu(), oracle.logits, atol=0.3, rtol=0)
