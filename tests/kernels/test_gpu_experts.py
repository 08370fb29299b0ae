"""Experts on a GPU: against every expert with every token, and replayed from a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.experts import NOWHERE, ExpertMatrices, ExpertMLPs, Routing
from quire.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.gpu


def random_mlps(count: int, hidden: int, features: int, dtype: torch.dtype) -> ExpertMLPs:
    """Of a size that keeps numbers about 1."""

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        dense = torch.randn(count, rows, columns, device="cuda") * columns**-0.5
        weights = dense.to(dtype)
        return ExpertMatrices(lambda expert, x: x @ weights[expert].T, weights)

    down = matrices(hidden, features)
    return ExpertMLPs(count, matrices(2 * features, hidden), Activation.SILU, down)


def random_routing(tokens: int, count: int, top_k: int) -> Routing:
    scores = torch.randn(tokens, count, device="cuda").softmax(-1)
    weights, experts = scores.topk(top_k)
    return Routing(experts, weights / weights.sum(-1, keepdim=True))


def expected(x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
    return ReferenceBackend().experts(x, routing, mlps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 17, 300, 2500])
@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "features"),
    [(128, 8, 2048, 768), (8, 2, 4096, 1792), (5, 1, 72, 40)],
)
def test_products(
    count: int, top_k: int, hidden: int, features: int, tokens: int, dtype: torch.dtype
) -> None:
    from quire.kernels.triton import TritonBackend

    torch.manual_seed(tokens)
    mlps = random_mlps(count, hidden, features, dtype)
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    routing = random_routing(tokens, count, top_k)
    found = TritonBackend().experts(x, routing, mlps)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    right = expected(x, routing, mlps)
    torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)


def test_replayed_with_other_choices_and_padding() -> None:
    from quire.kernels.triton import TritonBackend

    backend, mlps = TritonBackend(), random_mlps(16, 256, 128, torch.bfloat16)
    x = torch.randn(24, 256, device="cuda", dtype=torch.bfloat16)
    routing = random_routing(24, 16, 4)
    backend.experts(x, routing, mlps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.experts(x, routing, mlps)
    for used in (24, 1, 0, 13):
        chosen = random_routing(24, 16, 4)
        chosen.experts[used:] = NOWHERE
        chosen.experts[:used, 0] = 3  # one that all tokens choose
        routing.experts.copy_(chosen.experts)
        routing.weights.copy_(chosen.weights)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, expected(x, routing, mlps), atol=2e-2, rtol=2e-2)
        assert not out[used:].any()
