"""Activations as codes all through a model: each family hands them on where a matrix takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES, Oracle
from paged import PagedModel
from torch import Tensor

from quire.kernels.codes import CodeFormat, quantise
from quire.kernels.reference import ReferenceBackend
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.quantized.scaled import ScaledMatrix
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")
# One of each way to lay out a layer, and whether norms write codes there: those behind do not.
FAMILIES = {
    "qwen3": True,
    "gemma2": True,
    "glm4": True,
    "granite": True,
    "olmo2": False,
}


class Counting(ReferenceBackend):
    """Counts what is written as codes."""

    def __init__(self) -> None:
        self.norms = self.gates = 0

    def quantised_norm(self, *args):
        self.norms += 1
        return super().quantised_norm(*args)

    def quantised_gate(self, *args):
        self.gates += 1
        return super().quantised_gate(*args)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(name for name in CASES if name.startswith(family))
    oracle = Oracle(case, tmp_path)
    source = open_model(str(oracle.folder), quantization="fp8")
    model = build_model(source, torch.float32, CPU, progress=False)
    ids = {"a": oracle.ids[:12]}
    form = CodeFormat()

    def multiply(matrix: ScaledMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return QuantizedMatrix.multiply(matrix, quantise(x, form).dense(), bias)

    with monkeypatch.context() as each_by_itself:
        each_by_itself.setattr(ScaledMatrix, "multiply", multiply)
        plain = Counting()
        right = PagedModel(model, plain).step(ids)["a"]
    assert plain.norms == plain.gates == 0

    monkeypatch.setattr(ScaledMatrix, "takes", lambda *_: form)
    counting = Counting()
    found = PagedModel(model, counting).step(ids)["a"]
    layers = model.config.num_layers
    assert counting.gates == layers
    assert counting.norms == (2 * layers if FAMILIES[family] else 0)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=0)
