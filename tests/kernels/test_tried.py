"""Kernels in Gluon, which not every version of Triton can build: trials, and what follows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from quire.kernels.fp8 import FP8
from quire.kernels.reference import ReferenceBackend
from quire.kernels.triton import tried
from quire.kernels.triton.attention import dense, fp8_choice
from quire.kernels.triton.experts import hopper_choice
from quire.kernels.triton.int4 import product
from quire.kernels.triton.latent import choice, hopper_prompt
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache

TRIALS: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (dense._can_be_built, (4, 128)),
    (dense._can_be_built, (8, 64)),
    (fp8_choice._can_be_built, ()),
    (choice._can_be_built, ()),
    (hopper_prompt._can_be_built, ()),
    (hopper_choice._can_be_built, ()),
    (product._can_be_built, ()),
]


@pytest.fixture
def trials() -> Iterator[None]:
    """What a test tries is forgotten."""
    yield
    tried.forget_trials()


@pytest.mark.parametrize(("trial", "sizes"), TRIALS)
def test_a_trial_launches_what_it_should(
    trial: Callable[..., Any], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as can be seen without a GPU: nothing else would make a trial fail."""
    launched: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        known = {name: options[name] for name in options if name in kernel.arg_names}
        launched.append(inspect.signature(kernel.fn).bind(*args, **known))

    monkeypatch.setattr(JITFunction, "run", run)
    inspect.unwrap(trial)(torch.device("cpu"), torch.bfloat16, *sizes)
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize(("trial", "sizes"), TRIALS)
def test_all_can_be_built(trial: Callable[..., Any], sizes: tuple[int, ...], trials: None) -> None:
    device = torch.device("cuda")
    if not tried.is_hopper(device):
        pytest.skip("for Hopper GPUs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial(device, torch.bfloat16, *sizes)


def test_what_cannot_be_built_is_said_once_and_tried_again_when_forgotten(trials: None) -> None:
    tries: list[int] = []

    @tried.tried("Everything is")
    def can_be_built(number: int) -> None:
        tries.append(number)
        raise ValueError("no such layout")

    with pytest.warns(UserWarning, match="Everything is slower with .* Triton: no such layout"):
        assert not can_be_built(1)
    assert not can_be_built(1) and tries == [1]
    tried.forget_trials()
    with pytest.warns(UserWarning, match="no such layout"):
        assert not can_be_built(1)
    assert tries == [1, 1]


def test_a_dry_run_forgets_trials_of_what_cannot_be_compiled(
    trials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton.dry_run import DryRun

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(DryRun, "_number", 0)
    tries: list[int] = []

    @tried.tried("Nothing is")
    def can_be_built() -> None:
        tries.append(1)

    def fail() -> None:
        raise ValueError("no such layout")

    class Kernel:
        run = None

    kernel, done, left = Kernel(), [], []
    with DryRun() as run:
        assert can_be_built()
        places = [
            run.submit("broken", fail, done.append, left.append),
            run.submit("whole", lambda: kernel, done.append, left.append),
            run.submit("whole", fail, done.append, left.append),  # the same: compiled once
            run.submit("broken", fail, done.append),  # as versions have it that leave nothing there
        ]
    assert done == [kernel, kernel] and left == [places[0]]
    assert can_be_built() and len(tries) == 2


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_warm_up_of_one_block_goes_where_all_blocks_will(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else the kernel would be compiled by the first request."""
    monkeypatch.setattr(fp8_choice, "is_hopper", lambda _: True)
    monkeypatch.setattr(fp8_choice, "_can_be_built", lambda *_: True)
    layout = KVLayout.plain(2, 2, 128, 16, FP8)
    pool = PagedKVCache(layout, blocks, torch.device("cpu"), ReferenceBackend())
    q = torch.zeros(20, 8, 128, dtype=torch.bfloat16)
    assert fp8_choice.reads_words(q, pool.layers[0], window=None, span=1)
