"""Head sizes, soft caps, sinks and windows: every backend against the definition, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Prompts, tokens behind a prefix and decodes in one step; decodes whose KV is split; and prompts
# that a CPU attends tile by tile.
MIXED = [(1, 17), (6, 6), (1, 1), (18, 21), (3, 40)]
SPLIT = [(1, 300), (2, 140), (1, 9)]
TILES = [(70, 150), (1, 5)]
MANY = [(1, 1 + 11 * i) for i in range(17)]  # so many that a GPU splits no window


@dataclass(frozen=True)
class Case:
    """Each value of a field meets most values of the others in some case."""

    lengths: list[tuple[int, int]]
    head_dim: int
    v_dim: int | None = None
    group: int = 2
    kv_heads: int = 1
    softcap: float | None = None
    has_sinks: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float32


CASES = {
    "64-sinks-window": Case(MIXED, 64, group=8, kv_heads=2, has_sinks=True, window=9),
    "64-all-split": Case(SPLIT, 64, kv_heads=2, softcap=2.0, has_sinks=True, window=130),
    "64-all-tiles": Case(TILES, 64, kv_heads=2, softcap=2.0, has_sinks=True, window=50),
    "64-sinks-many": Case(MANY, 64, group=8, kv_heads=2, has_sinks=True, window=128),
    "80-sinks-split": Case(SPLIT, 80, group=1, has_sinks=True),
    "80-softcap": Case(MIXED, 80, group=3, softcap=1.0),
    "96-softcap-split": Case(SPLIT, 96, softcap=5.0, window=130),
    "96-sinks-half": Case(MIXED, 96, has_sinks=True, dtype=torch.float16),
    "128-all-half": Case(MIXED, 128, softcap=2.0, has_sinks=True, dtype=torch.float16),
    "128-sinks-split": Case(SPLIT, 128, group=4, has_sinks=True, window=100),
    "128-all": Case(MIXED, 128, softcap=2.0, has_sinks=True, dtype=torch.bfloat16),
    "192-split": Case(SPLIT, 192, group=1),
    "192-sinks-tiles": Case(TILES, 192, has_sinks=True),
    "192-128": Case(MIXED, 192, 128, group=1, window=9),
    "192-128-all-split": Case(SPLIT, 192, 128, kv_heads=2, softcap=2.0, has_sinks=True),
    "32-64-tiles": Case(TILES, 32, 64, group=3, softcap=2.0),
    "256-softcap-window": Case(MIXED, 256, softcap=3.0, window=9),
    "256-sinks-split": Case(SPLIT, 256, has_sinks=True),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def make(step, case: Case):
    shape = {
        "kv_heads": case.kv_heads,
        "group": case.group,
        "head_dim": case.head_dim,
        "v_dim": case.v_dim,
    }
    made = step(case.lengths, **shape, window=case.window, dtype=case.dtype, block_size=16)
    sinks = 2 * torch.randn(made.q.shape[1]) if case.has_sinks else None
    return replace(made, softcap=case.softcap, sinks=sinks)


def exact(step, window: int | None) -> Tensor:
    """The output for all rows. What no row sees may be NaN in the pool, and counts as 0 here."""
    pages, batch, rows = step.pages, step.batch, []
    group = step.q.shape[1] // pages.kv_heads
    tokens = iter(zip(step.q.double(), step.k.double(), step.v.double(), strict=True))
    for table, new, context in zip(
        batch.block_tables.long(), batch.query_lens, batch.contexts, strict=True
    ):
        q, own_k, own_v = map(torch.stack, zip(*(next(tokens) for _ in range(new)), strict=True))
        place = torch.arange(context)
        block, offset = table[place // step.block_size], place % step.block_size
        k, v = (part[block, :, offset].double().nan_to_num() for part in (pages.k, pages.v))
        k[context - new :], v[context - new :] = own_k, own_v
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("rhd,thd->hrt", q, k) * step.scale
        if step.softcap is not None:
            scores = step.softcap * torch.tanh(scores / step.softcap)
        distance = torch.arange(context - new, context)[:, None] - place
        seen = (distance >= 0) & (distance < (window or context))
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True)
        if step.sinks is not None:
            total = total + step.sinks.double().exp()[:, None, None]
        rows.append(torch.einsum("hrt,thd->rhd", weights / total, v))
    return torch.cat(rows).float()


def test_the_reference(step, case):
    made = make(step, replace(case, dtype=torch.float32))
    expected = exact(made, case.window)
    torch.testing.assert_close(made.expected(case.window), expected, rtol=0, atol=1e-5)


def test_the_definition(subject, step, case):
    if subject.is_interpreted and case.dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    made = make(step, case)
    out = made.on(subject.device).run(subject.backend, case.window)
    atol = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, exact(made, case.window), rtol=0, atol=atol)


def test_sinks_far_from_every_score(subject, step):
    """One takes all the weight, and one takes none."""
    made = step([(1, 150), (1, 3), (18, 18)], kv_heads=1, group=2, head_dim=32)
    made = replace(made, sinks=torch.tensor([300.0, -300.0]))
    out = made.on(subject.device).run(subject.backend)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    without = replace(made, sinks=None).on(subject.device).run(subject.backend)
    torch.testing.assert_close(out[:, 1], without[:, 1], rtol=0, atol=1e-6)


def test_windows_of_several_layers_in_one_pass(subject, step):
    """What one layer works out for its window is not what another one uses."""
    made = step([(1, 40), (18, 30)], head_dim=32).on(subject.device)
    subject.backend.begin(made.batch)
    subject.backend.write_kv(made.pages, made.k, made.v, made.batch)
    for window in (None, 5, None, 20):
        out = made.attend(subject.backend, window).cpu()
        torch.testing.assert_close(out, exact(made.on("cpu"), window), rtol=0, atol=1e-5)


def test_two_batches_in_one_pass(subject, step):
    """Layers of two KV groups take turns, each with its own batch and pages."""
    groups = [step([(1, 9), (5, 20)], head_dim=32, seed=1), step([(3, 7)], head_dim=16, seed=2)]
    here = [made.on(subject.device) for made in groups]
    for made in here:
        subject.backend.begin(made.batch)
    for _ in range(2):
        for made, group in zip(here, groups, strict=True):
            subject.backend.write_kv(made.pages, made.k, made.v, made.batch)
            out = made.attend(subject.backend).cpu()
            torch.testing.assert_close(out, exact(group, None), rtol=0, atol=1e-5)
