"""The products of few tokens with the parts of `kv_b_proj`, held against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from exact_products import check as check_within

check = partial(check_within, slack=2)

SHAPES = [  # heads, nope, values, rank
    (16, 128, 128, 512),
    (3, 24, 20, 72),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens_in_the_space_of_latents_and_back(
    triton_device: str, tokens: int, shape: tuple[int, int, int, int]
) -> None:
    from quire.kernels.triton.latent.absorb import absorb, is_few, values_of

    heads, nope, values, rank = shape
    torch.manual_seed(tokens)
    matrix = (torch.randn(heads, nope + values, rank) * rank**-0.5).to(triton_device, torch.float16)
    # As a layer has them: q beside its rotated part, and latents before it.
    wide = torch.randn(tokens, heads, nope + 8).to(triton_device, torch.float16)
    q, k_rows, v_rows = wide[..., :nope], matrix[:, :nope], matrix[:, nope:]
    out = torch.full((tokens, heads, rank + 8), torch.nan, dtype=q.dtype, device=triton_device)
    assert is_few(q, k_rows) and not is_few(q.float(), k_rows)
    absorb(q, k_rows, out[..., :rank])
    check(out[..., :rank], torch.einsum("thn,hnr->thr", q.double().cpu(), k_rows.double().cpu()))
    assert out[..., rank:].isnan().all()
    sums = torch.randn(tokens, heads, rank).to(triton_device, torch.float16)
    wanted = torch.einsum("thr,hvr->thv", sums.double().cpu(), v_rows.double().cpu())
    check(values_of(sums, v_rows), wanted)
