"""Kernels in Gluon, which not every version of Triton can build: trials, and what follows."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.runtime.jit import JITFunction

from quire.kernels.four_bits import FourBitExperts
from quire.kernels.fp8 import FP8
from quire.kernels.gguf_tiles import TILE_TYPES
from quire.kernels.gguf_tiles import to_tiles as to_gguf_tiles
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.reference import ReferenceBackend
from quire.kernels.triton import pdl, tried
from quire.kernels.triton.attention import dense, fp8_choice
from quire.kernels.triton.experts import mlps
from quire.kernels.triton.gguf import product as gguf_product
from quire.kernels.triton.int4 import product as int4_product
from quire.kernels.triton.latent import choice, hopper_prompt
from quire.kernels.triton.small_dots import has_small_dots
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.runner.warmup import compile_ahead

TRIALS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (dense._can_be_built, (4, 128)),
    (dense._can_be_built, (8, 64)),
    (fp8_choice._can_be_built, ()),
    (choice._can_be_built, ()),
    (hopper_prompt._can_be_built, ()),
    (mlps._can_be_built, ()),
    (int4_product._can_be_built, (128, False)),
    (int4_product._can_be_built, (384, True)),
    *((gguf_product._can_be_built, (kind,)) for kind in TILE_TYPES.values()),
]


@pytest.fixture
def trials() -> Iterator[None]:
    """What a test tries is forgotten."""
    yield
    tried.forget_trials()


@pytest.mark.parametrize(("trial", "sizes"), TRIALS)
def test_a_trial_launches_what_it_should(
    trial: Callable[..., Any], sizes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
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
def test_all_can_be_built(trial: Callable[..., Any], sizes: tuple[Any, ...], trials: None) -> None:
    device = torch.device("cuda")
    if not tried.is_hopper(device):
        pytest.skip("for Hopper GPUs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial(device, torch.bfloat16, *sizes)


@pytest.mark.gpu
def test_small_tiles_are_multiplied_since_triton_3_5(trials: None) -> None:
    is_new = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5)
    assert bool(has_small_dots(torch.device("cuda"))) == is_new


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


@pytest.fixture
def broken_gluon(monkeypatch: pytest.MonkeyPatch, trials: None) -> None:
    """A Hopper GPU, and a version of Triton that builds none of its kernels."""

    def run(*_: Any, **__: Any) -> None:
        raise ValueError("no such layout")

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(mlps, "is_hopper", lambda _: True)
    for product in (int4_product, gguf_product):
        monkeypatch.setattr(product, "_capability", lambda _: (9, 0))
        monkeypatch.setattr(product, "has_small_dots", lambda _: True)


def launches_of_many(product: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows for which the plain kernel for many is asked from now on."""
    found: list[int] = []
    monkeypatch.setattr(product, "many_rows", lambda x, *_: found.append(len(x)))
    return found


def int4_matrix() -> Int4Tiles:
    words = torch.zeros(16, 96, dtype=torch.int16)
    return Int4Tiles(words, torch.zeros(16, 1, dtype=torch.float16), None, 384)


def test_four_bit_products_go_without_gluon(
    broken_gluon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches_of_many(int4_product, monkeypatch)
    with pytest.warns(UserWarning, match="Four-bit products are slower"):
        int4_product.int4_linear(torch.zeros(20, 384).half(), int4_matrix(), None)
    assert launched == [20]


def test_gguf_products_go_without_gluon(
    broken_gluon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches_of_many(gguf_product, monkeypatch)
    matrix = to_gguf_tiles("Q8_0", torch.zeros(16, 8 * 34, dtype=torch.uint8))
    with pytest.warns(UserWarning, match="GGUF products are slower"):
        gguf_product.gguf_linear(torch.zeros(20, 256).half(), matrix, None)
    assert launched == [20]


def test_experts_go_without_gluon(broken_gluon: None) -> None:
    weights = FourBitExperts(torch.zeros(1, 64, 32).short(), torch.zeros(1, 1, 64).int())
    x: Any = SimpleNamespace(
        shape=(40, 128), dtype=torch.bfloat16, is_cuda=True, device=torch.device("cpu")
    )
    with pytest.warns(UserWarning, match="MXFP4 experts are slower"):
        assert not mlps._is_for_hopper(x, weights)


def test_without_small_dots_few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.4 has none."""
    for product in (int4_product, gguf_product):
        monkeypatch.setattr(product, "has_small_dots", lambda _: False)
    launched = launches_of_many(int4_product, monkeypatch)
    int4_product.int4_linear(torch.zeros(1, 384).half(), int4_matrix(), None)
    assert launched == [1]
    launched = launches_of_many(gguf_product, monkeypatch)
    matrix = to_gguf_tiles("Q8_0", torch.zeros(16, 8 * 34, dtype=torch.uint8))
    gguf_product.gguf_linear(torch.zeros(1, 256).half(), matrix, None)
    assert launched == [1]


def test_a_kernel_starts_early_only_where_triton_can_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_triton_3_4(_builder: Any = None) -> None: ...

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    pdl_launch = inspect.unwrap(pdl.pdl_launch)
    assert pdl_launch(torch.device("cuda")) == {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(pdl, "gdc_wait", of_triton_3_4)
    assert pdl_launch(torch.device("cuda")) == {"PDL": False}


def test_nothing_is_compiled_ahead_where_triton_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode", raising=False)
    monkeypatch.delitem(sys.modules, "quire.kernels.triton.dry_run", raising=False)
    nothing: Any = None
    ahead = compile_ahead(nothing, nothing, torch.float16, torch.device("cuda"), 1)
    assert ahead.result() is None
