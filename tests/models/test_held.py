"""What is said of a model's memory before it is loaded is what it takes then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_models import METHODS, QuantizedModel

from quire.api import cli
from quire.layers.matrix import Matrix
from quire.models.held import NO_MATRIX, held_by_format
from quire.models.source import build_model, open_model, shapes

NAMES = {
    "fbgemm": {"fp8 by row"},
    "fp8-blocks": {"fp8 in blocks of 128 × 128"},
    "int-quantized": {"int8 by row"},
    "awq": {"4 bits in groups of 64 with zeros"},
    "pack-quantized-8": {"8 bits in groups of 64"},
    "nvfp4-pack-quantized": {"NVFP4"},
    "mxfp4-pack-quantized": {"MXFP4"},
    "mixed-precision": {"4 bits in groups of 64", "fp8 by row"},
}


@pytest.mark.parametrize("method", NAMES)
def test_each_format_is_named_with_its_bytes(method: str, tmp_path: Path) -> None:
    source = open_model(str(QuantizedModel(METHODS[method], tmp_path / "m").folder))
    held = held_by_format(shapes(source.config), torch.float32)
    assert held.keys() == {*NAMES[method], "float32", NO_MATRIX}  # both ends are dense
    model = build_model(source, torch.float32, torch.device("cpu"), progress=False)
    assert sum(each.bytes for each in held.values()) == sum(p.nbytes for p in model.parameters())
    matrices = [module for module in model.modules() if isinstance(module, Matrix)]
    in_words = ", ".join(matrix.format_name for matrix in matrices)
    assert all(name in in_words for name in NAMES[method])


def test_info_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(QuantizedModel(METHODS["gptq"], tmp_path / "m").folder)
    assert cli.main(["info", folder, "--json", "--device", "cpu", "--dtype", "float32"]) == 0
    says = json.loads(capsys.readouterr().out)["model"]
    assert says["architecture"] == "LlamaForCausalLM" and says["computes_in"] == "float32"
    model = shapes(open_model(folder).config)
    held = held_by_format(model, torch.float32)
    assert says["weights"] == sum(each.bytes for each in held.values())
    assert any("4 bits in groups of 64 with zeros (8)" in line for line in says["of_which"])


def test_settings_of_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--quantization", "int4"]) != 0
    assert "--quantization needs a MODEL" in capsys.readouterr().err
