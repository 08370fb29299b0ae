"""Layers split over ranks: the ranks' results, put together by hand, are the whole layer's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.embedding import Vocabulary
from quire.layers.linear import ColumnLinear, Output, RowLinear
from quire.layers.matrix import DenseMatrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import Layer


def ranks(size: int) -> list[TensorParallel]:
    """Ranks whose partial results stay their own, for the test to put together."""
    return [TensorParallel(rank, size) for rank in range(size)]


def fill(layer: Layer, path: str, tensors: dict[str, Tensor]) -> None:
    for parameter in layer.parameters():
        parameter.fill_(torch.nan)
    for weight in layer.weights(path):
        assert weight.shape == tuple(tensors[weight.name].shape)
        weight.fill(tensors[weight.name][weight.part])


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_linear(size: int, rows: int) -> None:
    q, k = Output("q", 4, 6), Output("k", 2, 6, shared=True)
    tensors = {
        "attn.q.weight": torch.randn(24, 10),
        "attn.q.bias": torch.randn(24),
        "attn.k.weight": torch.randn(12, 10),
        "attn.k.bias": torch.randn(12),
    }
    x = torch.randn(rows, 10)
    outs = []
    for tp in ranks(size):
        layer = ColumnLinear(10, (q, k), bias=True, tp=tp)
        fill(layer, "attn.qk", tensors)
        outs.append(layer(x).split(layer.sizes, dim=1))
    whole_q = F.linear(x, tensors["attn.q.weight"], tensors["attn.q.bias"])
    whole_k = F.linear(x, tensors["attn.k.weight"], tensors["attn.k.bias"])
    torch.testing.assert_close(torch.cat([q for q, _ in outs], 1), whole_q)
    kept = [k for _, k in outs][:: max(1, size // 2)]  # two heads, so pairs of four ranks share
    torch.testing.assert_close(torch.cat(kept, 1), whole_k)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_linear_adds_its_bias_once(size: int) -> None:
    tensors = {"o.weight": torch.randn(10, 24), "o.bias": torch.randn(10)}
    x = torch.randn(7, 24)
    total = torch.zeros(7, 10)
    for tp in ranks(size):
        layer = RowLinear(4, 10, bias=True, tp=tp, width=6)
        fill(layer, "o", tensors)
        total += layer(x[:, layer.part.start : layer.part.stop])
    torch.testing.assert_close(total, F.linear(x, tensors["o.weight"], tensors["o.bias"]))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_row_linear_adds_to_the_stream_where_it_is_whole(
    size: int, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseMatrix, "adds_at_once", lambda *_: adds)
    tensors = {"o.weight": torch.randn(10, 24), "o.bias": torch.randn(10)}
    layer = RowLinear(4, 10, bias=True, tp=ranks(size)[0], width=6)
    fill(layer, "o", tensors)
    x, before = torch.randn(2, 24 // size), torch.randn(2, 10)
    stream = before.clone()
    delta = layer.onto(stream, x)
    assert (delta is None) == (adds and size == 1)
    if delta is not None:
        assert torch.equal(stream, before)
        stream += delta
    torch.testing.assert_close(stream, before + layer(x))


@pytest.mark.parametrize("vocab", [12, 10, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary(size: int, vocab: int) -> None:
    tensors = {"e.weight": torch.randn(vocab, 5)}
    ids, hidden = torch.randint(0, vocab, (9,)), torch.randn(2, 5)
    rows, columns = torch.zeros(9, 5), []
    for tp in ranks(size):
        layer = Vocabulary(vocab, 5, tp)
        fill(layer, "e", tensors)
        rows += layer.embed(ids)
        columns.append(layer.logits(hidden))
    torch.testing.assert_close(rows, tensors["e.weight"][ids])
    logits = torch.cat(columns, dim=1)[:, :vocab]
    torch.testing.assert_close(logits, hidden @ tensors["e.weight"].T)
