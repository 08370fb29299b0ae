"""Tensors that are parts of others: fused ones are cut, rows reordered, experts read one by one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.errors import ModelError
from quire.layers.experts import ExpertNames, Experts
from quire.layers.linear import ColumnLinear, Output
from quire.layers.norm import HeadNorm
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block, Layer, TensorPlace, Weight, ranges
from quire.models.checkpoints import weights
from quire.models.checkpoints.dummy import Noise
from quire.models.checkpoints.lazy_tensor import TensorFile
from quire.models.checkpoints.safetensors import read_header
from quire.models.checkpoints.tensor_views import Inner, OneRow, ReorderedRows, RowSlice, Transposed
from quire.models.checkpoints.weights import load_weights

ORDER = (2, 0, 3, 1)
PARTS = [(), (slice(1, 7),), (slice(3, 12), slice(2, 5)), (slice(None), slice(0, 1))]


class Model(Block):
    """Layers under names, as a `CausalLM` has them."""

    config = type("Config", (), {"architecture": "Test"})
    transposed_experts = False

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def text_tensor(self, name: str) -> str:
        return name

    def unexpected(self, left_out: Collection[str]) -> list[str]:
        return [*left_out]

    def weights(self) -> Any:
        for name, layer in self.layers.items():
            yield from layer.weights(name)


def column_linear(tp: TensorParallel) -> ColumnLinear:
    q = Output("q", 4, 4, order=ORDER)
    k = Output("k", 2, 4, shared=True, order=ORDER)
    return ColumnLinear(6, (q, k, Output("v", 2, 4, shared=True)), True, tp, fused="qkv")


def reordered(whole: Tensor) -> Tensor:
    return whole.unflatten(0, (-1, 4))[:, list(ORDER)].flatten(0, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_fused_tensor_is_cut_for_each_rank(size: int, is_fused: bool) -> None:
    q, k, v = torch.randn(16, 6), torch.randn(8, 6), torch.randn(8, 6)
    biases = [torch.randn(len(each)) for each in (q, k, v)]
    tensors = {f"{n}.weight": t for n, t in zip("qkv", (q, k, v), strict=True)}
    tensors |= {f"{n}.bias": t for n, t in zip("qkv", biases, strict=True)}
    if is_fused:
        tensors = {"qkv.weight": torch.cat((q, k, v)), "qkv.bias": torch.cat(biases)}
    wholes = (
        [reordered(q), reordered(k), v],
        [reordered(biases[0]), reordered(biases[1]), biases[2]],
    )
    for rank in range(size):
        layer = column_linear(TensorParallel(rank, size))
        load_weights(Model(a=layer), tensors.items())  # type: ignore[arg-type]
        for held, whole in zip((layer.matrix.weight, layer.bias), wholes, strict=True):
            wanted = [t[p.start : p.stop] for t, p in zip(whole, layer.parts, strict=True)]
            assert torch.equal(held, torch.cat(wanted))


def test_norms_of_heads_are_reordered_alike() -> None:
    norm = HeadNorm(3, 1, 4, 1e-6, ORDER)
    tensors = {"q_norm.weight": torch.randn(4), "k_norm.weight": torch.randn(4)}
    load_weights(Model(a=norm), tensors.items())  # type: ignore[arg-type]
    q, k = (reordered(tensor) for tensor in tensors.values())
    assert torch.equal(norm.weight, torch.stack((q, q, q, k)))


def test_a_fused_tensor_of_another_shape_is_named_once() -> None:
    tensors = {"qkv.weight": torch.zeros(31, 6), "qkv.bias": torch.zeros(32)}
    with pytest.raises(ModelError) as error:
        load_weights(Model(a=column_linear(TensorParallel())), tensors.items())  # type: ignore[arg-type]
    assert str(error.value).count("qkv.weight is [31, 6], not [32, 6]") == 1
    assert "missing" not in str(error.value)


def test_a_name_asked_for_twice_is_an_error() -> None:
    tp = TensorParallel()
    model = Model(a=column_linear(tp), b=column_linear(tp))  # side by side, so names are the same
    tensors = {"qkv.weight": torch.zeros(32, 6), "qkv.bias": torch.zeros(32)}
    with pytest.raises(ValueError, match=r"ask for the tensor q\.weight"):
        load_weights(model, tensors.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("part", PARTS)
def test_views_read_what_their_whole_has(part: tuple[slice, ...]) -> None:
    whole = torch.randn(20, 5)
    rows = RowSlice(whole, 4, 12)
    assert torch.equal(rows[part], whole[4:16][part])
    assert torch.equal(ReorderedRows(rows, ORDER)[part], reordered(whole[4:16])[part])
    several = torch.randn(3, 12, 5)
    assert torch.equal(Inner(several, 2)[part], several[2][part])


def test_a_vector_as_a_row() -> None:
    vector = torch.randn(7)
    row = OneRow(vector)
    assert tuple(row.shape) == (1, 7)
    for part in ((), (slice(0, 1),), (slice(0, 1), slice(2, 5)), (slice(0, 0), slice(1, 2))):
        assert torch.equal(row[part], vector.unsqueeze(0)[part])


@pytest.mark.parametrize("part", [(), (slice(1, 3),), (slice(0, 2), slice(1, 4), slice(2, 5))])
def test_three_dimensions_are_read_in_parts_and_pieces(
    tmp_path: Path, part: tuple[slice, ...]
) -> None:
    whole = torch.randn(3, 4, 6)
    save_file({"before": torch.randn(7), "experts": whole}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    tensor = header.tensor(TensorFile(tmp_path / "x.safetensors"), "experts")
    assert torch.equal(tensor[part], whole[part])
    place = torch.full([len(r) for r in ranges(whole.shape, part)], torch.nan)
    for piece in Weight("experts", (3, 4, 6), TensorPlace(place), part).pieces(10):
        piece.fill(tensor[piece.part])
    assert torch.equal(place, whole[part])


def test_random_numbers_of_a_part_are_those_of_the_whole() -> None:
    shape, part = (8, 6), (slice(4, 8), slice(2, 5))
    for order in ((), ORDER):
        whole, some = torch.empty(shape), torch.empty(4, 3)
        for place, taken in ((whole, ()), (some, part)):
            noise = Noise(torch.device("cpu"))
            noise.fill(Weight("q.weight", shape, TensorPlace(place), taken, order=order))
        assert torch.equal(some, whole[part])
        assert len(whole.unique(dim=0)) == 8


def interleaved_experts(tp: TensorParallel) -> Experts:
    return Experts(6, 8, 3, tp, ExpertNames(interleaved=True), bias=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "tp",
    [TensorParallel(), TensorParallel(1, 2), TensorParallel(2, 3, expert_parallel=True)],
    ids=["alone", "cut", "whole"],
)
def test_gate_and_up_rows_that_take_turns(
    tp: TensorParallel, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of one tensor of all experts, in pieces of a few rows."""
    monkeypatch.setattr(weights, "PIECE", 18)  # three rows: a piece may begin with a row of up
    gates, ups, downs = torch.randn(3, 8, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 8)
    gate_bias, up_bias, down_bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 6)
    both = torch.stack((gates, ups), dim=2).flatten(1, 2)
    stored = {
        "mlp.experts.gate_up_proj": both,
        "mlp.experts.down_proj": downs,
        "mlp.experts.gate_up_proj_bias": torch.stack((gate_bias, up_bias), dim=2).flatten(1),
        "mlp.experts.down_proj_bias": down_bias,
    }
    if transposed:
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            stored[name] = stored[name].mT.contiguous()
    layer = interleaved_experts(tp)
    model = Model()
    model.weights = lambda: layer.weights("mlp.experts")  # type: ignore[method-assign]
    model.transposed_experts = transposed
    load_weights(model, stored.items())  # type: ignore[arg-type]
    mine, part = list(layer.mine), slice(layer.part.start, layer.part.stop)
    wanted = torch.stack((gates[mine, part], ups[mine, part]), dim=1)
    assert torch.equal(layer.gate_up.weight, wanted.flatten(0, 2))
    assert torch.equal(layer.down.weight, downs[mine, :, part].flatten(0, 1))
    assert torch.equal(layer.gate_up_bias[:, : len(layer.part)], gate_bias[mine, part])
    assert torch.equal(layer.gate_up_bias[:, len(layer.part) :], up_bias[mine, part])
    assert torch.equal(layer.down_bias, down_bias[mine])


def test_a_transposed_matrix_reads_its_parts() -> None:
    whole = torch.randn(7, 12)
    for part in PARTS:
        assert torch.equal(Transposed(whole)[part], whole.T[part])
