"""Models quantised while they are loaded: close to what they were, and smaller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedModel
from quantized_models import METHODS, QuantizedModel
from tiny_ranks import write_weights

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import backend_for
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.tp import TensorParallel
from quire.models.causal_lm import CausalLM
from quire.models.source import build_model, open_model, shapes

IDS = [5, 17, 99, 3, 42, 130, 0, 77]
CPU = torch.device("cpu")


def load(folder: Path, load_format: str = "auto", quantization: str | None = None) -> CausalLM:
    source = open_model(str(folder), load_format, False, quantization=quantization)
    return build_model(source, torch.float32, CPU, progress=False)


def logits(model: CausalLM) -> torch.Tensor:
    return PagedModel(model, backend_for(CPU)).step({"a": IDS})["a"]


def matrices(model: CausalLM) -> dict[str, QuantizedMatrix]:
    named = model.named_modules()
    return {path: module for path, module in named if isinstance(module, QuantizedMatrix)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("made") / "model")


@pytest.mark.parametrize(("quantization", "near"), [("fp8", 0.1), ("int8", 0.03), ("int4", 0.4)])
def test_a_dense_checkpoint(folder: Path, quantization: str, near: float) -> None:
    plain, made = load(folder), load(folder, quantization=quantization)
    assert len(matrices(made)) == 4 * plain.config.num_layers  # and neither end of the model
    right, found = logits(plain), logits(made)
    assert 0 < (found - right).norm() < near * right.norm()
    for path, matrix in matrices(made).items():
        dense = plain.get_submodule(path).get_parameter("weight")
        assert (matrix.dense() - dense).norm() < near / 2 * dense.norm()


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_random_weights_are_those_of_a_checkpoint(folder: Path, quantization: str) -> None:
    """`folder` has the same random numbers in a file: what is made of them is the same."""
    from_file, at_random = (load(folder, how, quantization) for how in ("auto", "dummy"))
    for path, matrix in matrices(from_file).items():
        assert torch.equal(matrix.dense(), matrices(at_random)[path].dense())


def test_ends_of_a_model_stay_dense_and_the_rest_shrinks(folder: Path) -> None:
    model = load(folder, quantization="int4")
    for matrix in matrices(model).values():
        size = sum(parameter.nbytes for parameter in matrix.parameters())
        assert size <= matrix.out_features * matrix.in_features * (0.5 + 4 / 64)


@pytest.mark.parametrize(
    "method",
    [
        "fp8-tensor",
        "fp8-blocks",
        "int-quantized",
        "awq",
        "pack-quantized-8",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mixed-precision",
    ],
)
def test_random_weights_of_a_quantised_checkpoint(method: str, tmp_path: Path) -> None:
    """Only its config is there. They lie in memory as those of the checkpoint would."""
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    made = QuantizedModel(METHODS[method], tmp_path / "m", **changes)
    (made.folder / "model.safetensors").rename(tmp_path / "weights")
    model = load(made.folder, "dummy")
    (tmp_path / "weights").rename(made.folder / "model.safetensors")
    stored = matrices(load(made.folder))
    assert stored.keys() == matrices(model).keys()
    assert logits(model).isfinite().all()
    for path, matrix in matrices(model).items():
        found = {name: (t.dtype, t.shape) for name, t in matrix.named_parameters()}
        right = {name: (t.dtype, t.shape) for name, t in stored[path].named_parameters()}
        assert found["weight"] == right["weight"]
        assert found.keys() == right.keys()


@pytest.mark.parametrize(
    ("features", "ranks", "said"),
    [
        (81, 1, r"down_proj has 81 inputs, which 4 bits .*: choose another quantization or model"),
        (81, 3, r"down_proj has 81 inputs, which 4 bits .*: choose another quantization or model"),
        (162, 2, r"down_proj has a part of 81 inputs, .*: choose another tensor_parallel_size or"),
    ],
)
def test_odd_rows_have_no_four_bits(features: int, ranks: int, said: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    folder = write_weights(tmp_path / "m", intermediate_size=features, **heads)
    config = open_model(str(folder), quantization="int4").config
    with pytest.raises(ModelError, match=said):
        list(shapes(config, TensorParallel(0, ranks)).weights())


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    made = QuantizedModel(METHODS["fbgemm"], tmp_path / "m", num_hidden_layers=1)
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match=r"is quantised already, so quantization=int4 cannot"):
            open_model(str(made.folder), load_format, quantization="int4")


def test_an_engine_takes_the_setting(folder: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(str(folder), quantization="int8", use_tqdm=False, **settings) as llm:
        assert len(llm.generate([IDS], params)[0].outputs[0].token_ids) == 4
        model = llm.engine.runner.model
        assert matrices(model)


def test_near_misses() -> None:
    with pytest.raises(ConfigError, match=r"did you mean quantization\?"):
        LLM("smollm2", quantisation="fp8")
    with pytest.raises(
        ConfigError, match="quantization must be one of auto, fp8, int8, int4, none, not"
    ):
        LLM("smollm2", quantization="int3")


def test_a_config_says_what_it_is(folder: Path) -> None:
    config = open_model(str(folder), quantization="int4").config
    assert config != open_model(str(folder), quantization="int8").config
    assert hash(config) and json.dumps(str(config))


def test_kv_is_named_apart(folder: Path) -> None:
    """Of what a model is quantised to: others' KV would be found where tokens are the same."""
    made = (None, "fp8", "int8", "int4")
    names = [open_model(str(folder), quantization=each).fingerprint.result() for each in made]
    assert len(set(names)) == len(made)
    assert names[1] == open_model(str(folder), quantization="fp8").fingerprint.result()


def test_a_draft_model_is_not_quantised(folder: Path) -> None:
    """It stays as its checkpoint has it: a small one saves little, and would guess worse."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    with LLM(
        str(folder), quantization="int4", speculative=str(folder), use_tqdm=False, **settings
    ) as llm:
        drafter = llm.engine.scheduler.speculation.drafter
        assert matrices(llm.engine.runner.model) and not matrices(drafter._runner.model)
