"""The reference, against torch's own attention over a pool whose blocks are in order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.backend import backend_for
from quire.kernels.pages import pages_of
from quire.kernels.reference import ReferenceBackend
from quire.kernels.scoring import Scoring


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("window", [None, 4])
def test_agrees_with_torch(batch_of, cached, window):
    torch.manual_seed(0)
    context, kv_heads, group, dim, block_size = 19, 2, 3, 16, 8
    k, v = torch.randn(2, context, kv_heads, dim)
    q = torch.randn(context, kv_heads * group, dim)
    cache = torch.full((3, 1, 2, kv_heads, block_size, dim), torch.nan)
    reference = ReferenceBackend()
    everything = batch_of([(context, context)], [[0, 1, 2]], [*range(context)])
    (pages,) = pages_of(cache)
    reference.write_kv(pages, k, v, everything)
    batch = batch_of([(context - cached, context)], [[0, 1, 2]], [*range(cached, context)])
    out = reference.paged_attention(q[cached:], pages, batch, Scoring(0.3, window))

    position = torch.arange(context)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or context))
    k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen, scale=0.3)
    torch.testing.assert_close(out, expected.transpose(0, 1)[cached:], rtol=0, atol=1e-5)


def test_a_device_chooses_its_backend():
    pytest.importorskip("numba")
    assert backend_for(torch.device("cpu")).name == "numba"


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    assert backend_for(torch.device("cuda")).name == "triton"
