"""Layers with experts, of a backend that has a kernel wherever one may do the work of several."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from families import PROMPT, Oracle
from paged import PagedModel
from torch import Tensor

from quire.kernels.cpu import CpuBackend
from quire.kernels.experts import ExpertMLPs, RouterProducts, Routing
from quire.kernels.linear import linear
from quire.layers import router as router_layer
from quire.layers.matrix import DenseMatrix
from quire.layers.router import RoutingRule, Scores
from quire.models.source import build_model, open_model


class FewLaunches(CpuBackend):
    """What these kernels are to find, in plain torch; and how often each was called."""

    def __init__(self, choosing: bool) -> None:
        super().__init__()
        self.choosing, self.calls = choosing, Counter[str]()

    def norm_products(
        self,
        stream: Tensor,
        weight: Tensor,
        eps: float,
        matrix: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor] | None:
        self.calls["norm"] += 1
        x = self.add_rms_norm(stream, None, weight, eps)
        return x, linear(x, matrix, bias, None).to(dtype)

    def choosing_experts(
        self, x: Tensor, products: RouterProducts, mlps: ExpertMLPs
    ) -> Tensor | None:
        self.calls["choice"] += 1
        if not self.choosing:
            return None
        rule = RoutingRule(products.top_k, Scores.NONE, rounded=True)
        return self.experts(x, rule(products.numbers), mlps)

    def route(self, *_: object) -> Routing | None:
        return None


@pytest.mark.parametrize("choosing", [True, False])
@pytest.mark.parametrize("family", ["gpt-oss-mxfp4", "qwen3-moe", "deepseek-v2"])
def test_nothing_changes(
    family: str, choosing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(family, tmp_path)
    source = open_model(str(oracle.folder))
    model = build_model(source, torch.float32, torch.device("cpu"), False)
    ids = oracle.ids[:PROMPT]
    right = PagedModel(model, CpuBackend(), block_size=16).step({"a": ids})["a"]
    monkeypatch.setattr(DenseMatrix, "adds_at_once", lambda *_: True)
    monkeypatch.setattr(router_layer, "is_few", lambda *_: True)
    backend = FewLaunches(choosing)
    found = PagedModel(model, backend, block_size=16).step({"a": ids})["a"]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert backend.calls["norm"] > 0
    assert bool(backend.calls["choice"]) == (family == "gpt-oss-mxfp4")
