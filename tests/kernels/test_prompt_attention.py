"""The CPU kernel for the attention of long prompts, on whichever machine the tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from quire.kernels.numba import NumbaBackend, prompt_attention
from quire.kernels.numba import backend as backend_module
from quire.kernels.numba.host import has_avx512, is_arm_linux


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_to_torch(*_: object) -> None:
        raise AssertionError("torch was to attend")

    monkeypatch.setattr(backend_module, "attend_prefill", left_to_torch)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, without_torch: None) -> NumbaBackend:
    """One that leaves no prompt to torch."""
    monkeypatch.setattr(prompt_attention, "IS_FASTER", True)
    return NumbaBackend()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.diagonal
@pytest.mark.parametrize("window", [None, 1, 90, 600])
@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([(300, 300)], {}),
        ([(17, 300), (1, 50), (130, 700), (0, 0)], {"block_size": 16}),
        ([(257, 257)], {"kv_heads": 1, "group": 1, "head_dim": 64, "block_size": 32}),
        ([(40, 513)], {"head_dim": 48, "v_dim": 32, "block_size": 24}),
        ([(33, 1100)], {"head_dim": 32, "v_dim": 48, "group": 2}),
        ([(1030, 1030)], {"head_dim": 64, "block_size": 16}),
    ],
)
def test_as_the_reference(
    backend: NumbaBackend,
    step: Callable[..., Any],
    lengths: list[tuple[int, int]],
    sizes: dict[str, int],
    window: int | None,
) -> None:
    made = step(lengths, window=window, **sizes)
    found = made.on("cpu").run(backend, window)
    torch.testing.assert_close(found, made.expected(window), rtol=0, atol=2e-5)


@pytest.mark.skipif(not (has_avx512() or is_arm_linux()), reason="torch is as fast elsewhere")
def test_where_it_is_faster_it_is_used(step: Callable[..., Any], without_torch: None) -> None:
    made = step([(300, 300)])
    found = made.on("cpu").run(NumbaBackend(), None)
    torch.testing.assert_close(found, made.expected(None), rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_scores_of_every_kind(
    backend: NumbaBackend,
    step: Callable[..., Any],
    softcap: float | None,
    has_sinks: bool,
    window: int | None,
) -> None:
    made = step([(200, 420)], head_dim=32, window=window)
    sinks = torch.randn(6) * 5 if has_sinks else None
    made = replace(made, softcap=softcap, sinks=sinks, scale=1.5)
    found = made.on("cpu").run(backend, window)
    torch.testing.assert_close(found, made.expected(window), rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("rows", [17, 100, 299])
def test_rows_do_not_depend_on_those_beside_them(
    backend: NumbaBackend,
    step: Callable[..., Any],
    batch_of: Callable[..., Any],
    rows: int,
    window: int | None,
) -> None:
    """A prompt in chunks of any size has the same numbers, bit by bit."""
    made = step([(640, 640)], head_dim=64, window=window).on("cpu")
    whole = made.launch(backend, window)
    table = made.batch.block_tables[0, : 640 // made.block_size].tolist()
    batch = batch_of([(rows, 640)], [table], made.batch.slot_mapping[-rows:].tolist())
    last = replace(made, batch=batch, q=made.q[-rows:])  # K and V were written before
    backend.begin(batch)
    assert torch.equal(last.attend(backend, window), whole[-rows:])


def test_the_number_of_threads_changes_no_bit(
    backend: NumbaBackend, step: Callable[..., Any], threads: Callable[[int], None]
) -> None:
    made = step([(300, 520), (150, 400)], head_dim=64)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(made.on("cpu").run(backend))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
