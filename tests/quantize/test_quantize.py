"""Folders in four bits of models of several families: what reads them, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import METHODS, SHAPE, QuantizedModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire import LLM, SamplingParams
from quire.api.cli import main
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import backend_for
from quire.kernels.plain import PlainOps
from quire.quantize.calibrate import WatchedLLM
from quire.quantize.compressed import config_of
from quire.quantize.quantize import Summary, quantize
from quire.quantize.settings import CalibrationConfig

FEW = CalibrationConfig(calibration_tokens=512, device="cpu")
IDS = [5, 17, 99, 3, 42, 130, 0, 77]
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "intermediate_size": 320,
    "mlp_only_layers": [0],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "groups-of-two-sizes": ("Llama", {"intermediate_size": 320}),
    "phi3-fused": ("Phi3", {}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "shared-expert-of-odd-rows": (
        "Qwen2Moe",
        {**EXPERTS, "mlp_only_layers": [], "shared_expert_intermediate_size": 40},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 192}),
}


def make(name: str, folder: Path) -> Path:
    """A tiny model as `transformers` writes it."""
    import transformers

    torch.manual_seed(5)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    config.architectures = [f"{family}ForCausalLM"]
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        model.save_pretrained(folder)
    return folder


def dequantised(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder as numbers, by the format's own specification."""
    stored, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        layer, _, ending = name.rpartition(".")
        if ending == "weight_packed":
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            codes = (tensor.unsqueeze(-1) >> shifts & 15).flatten(1) - 8
            scales = stored[f"{layer}.weight_scale"].float()
            assert list(codes.shape) == stored[f"{layer}.weight_shape"].tolist()
            size = codes.shape[1] // scales.shape[1]
            found[f"{layer}.weight"] = codes * scales.repeat_interleave(size, dim=1)
        elif not ending.startswith("weight_"):
            found[name] = tensor
    return found


def tokens(model: Path, **settings: Any) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    basics = {"device": "cpu", "dtype": "float32", "num_blocks": 32, "use_tqdm": False}
    with LLM(str(model), **basics, **settings) as llm:
        return list(llm.generate([IDS], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module", params=list(MODELS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make(request.param, tmp_path_factory.mktemp("dense") / "model")
    out = folder.parent / "int4"
    return folder, out, quantize(str(folder), out, FEW, progress=False)


def test_the_engine_answers_with_it_as_with_its_numbers(
    made: tuple[Path, Path, Summary], tmp_path: Path
) -> None:
    folder, out, summary = made
    numbers = dequantised(out)
    assert numbers.keys() == load_file(folder / "model.safetensors").keys()
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file(numbers, dense / "model.safetensors")
    (dense / "config.json").write_text((folder / "config.json").read_text())
    assert tokens(out) == tokens(dense)
    assert summary.matrices > 0 and summary.bytes < 0.6 * summary.bytes_before


def test_transformers_opens_it(made: tuple[Path, Path, Summary]) -> None:
    """It computes with the numbers rounded to bfloat16."""
    pytest.importorskip("compressed_tensors")
    import transformers

    _, out, _ = made
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    basics: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    with LLM(str(out), use_tqdm=False, **basics) as llm:
        found = llm.generate([IDS], params, use_tqdm=False)[0].prompt_logprobs
    for entry, token, right in zip(found[1:], IDS[1:], theirs, strict=True):
        assert entry[token].logprob == pytest.approx(float(right[token]), abs=0.1)


def test_what_is_left_as_it_was(made: tuple[Path, Path, Summary]) -> None:
    folder, out, summary = made
    before, after = load_file(folder / "model.safetensors"), dequantised(out)
    rounded = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(rounded) == summary.matrices
    for name, tensor in before.items():
        is_matrix = tensor.dim() == 2 and not name.startswith(("lm_head", "model.embed"))
        is_gate = name.endswith((".gate.weight", ".shared_expert_gate.weight"))
        assert (name in rounded) == (is_matrix and not is_gate and tensor.shape[1] % 32 == 0)


@pytest.mark.parametrize("made", ["llama", "groups-of-two-sizes", "phi3-fused"], indirect=True)
def test_a_library_reads_it(made: tuple[Path, Path, Summary]) -> None:
    """compressed-tensors finds each layer in the config, and the numbers that lie there. Of experts
    transformers has one tensor, for which the library has no layers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
    )

    folder, out, _ = made
    import transformers

    raw = json.loads((out / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    theirs = QuantizationConfig.model_validate(raw["quantization_config"])
    apply_quantization_config(model, theirs)
    stored, numbers = load_file(out / "model.safetensors"), dequantised(out)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        is_rounded = f"{name}.weight_packed" in stored
        assert hasattr(layer, "quantization_scheme") == is_rounded, name
        if is_rounded:
            for ending in ("packed", "scale", "shape"):
                tensor = nn.Parameter(stored[f"{name}.weight_{ending}"], requires_grad=False)
                setattr(layer, f"weight_{ending}", tensor)
            layer.quantization_scheme.format = raw["quantization_config"]["format"]
            del layer.weight
            decompress_module(layer)
            found, right = layer.weight.float(), numbers[f"{name}.weight"]
            torch.testing.assert_close(found, right, rtol=2**-8, atol=0)  # it has bfloat16


def test_outputs_err_less_than_if_each_number_is_rounded_alone(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    texts = torch.randint(0, SHAPE["vocab_size"], (8, 64)).tolist()
    quantize(str(folder), tmp_path / "int4", FEW, progress=False)

    def foretold(model: str, **settings: Any) -> Tensor:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        basics: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
        with LLM(model, use_tqdm=False, **basics, **settings) as llm:
            found = llm.generate(texts, params, use_tqdm=False)
        return torch.tensor(
            [
                entry[token].logprob
                for output, text in zip(found, texts, strict=True)
                for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)
            ]
        )

    right = foretold(str(folder))
    alone = (foretold(str(folder), quantization="int4") - right).norm()
    assert (foretold(str(tmp_path / "int4")) - right).norm() < 0.9 * alone


def test_the_same_seed_makes_the_same_bytes_and_memory_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama", tmp_path / "model")
    quantize(str(folder), tmp_path / "one", FEW, progress=False)
    monkeypatch.setattr("quire.quantize.calibrate.free_memory", lambda device: 1)  # one at a time
    quantize(str(folder), tmp_path / "two", FEW, progress=False)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_experts_that_no_token_comes_to_are_rounded_all_the_same(tmp_path: Path) -> None:
    folder = make("qwen3-moe", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.1.mlp.gate.weight"]
    # Where the third and the first score most, the second and the fifth score least, and the other
    # way round; the fourth and the sixth are always between them.
    router[:] = router[0] * torch.tensor([[2.0], [-2.0], [3.0], [1.0], [-1.5], [0.0]])
    save_file(tensors, folder / "model.safetensors")
    summary = quantize(str(folder), tmp_path / "int4", FEW, progress=False)
    assert summary.unseen == 6  # gate, up and down of these two
    assert tokens(tmp_path / "int4")


def test_text_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("llama", tmp_path / "model")
    write_tokenizer(folder)
    (tmp_path / "text").write_text("abcdefgh " * 300)
    command = ["quantize", str(folder), str(tmp_path / "int4"), "--device", "cpu"]
    assert main([*command, "--text", str(tmp_path / "text")]) == 0
    assert "14 matrices in 4 bits" in capsys.readouterr().err
    assert (tmp_path / "int4" / "tokenizer.json").exists()
    (tmp_path / "short").write_text("abc")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 3000)
    for name, says in [
        ("short", "name a longer one"),
        ("binary", "is not text in UTF-8"),
        ("absent", "cannot be read: it is not a file"),
    ]:
        command[2] = str(tmp_path / name) + "-out"
        assert main([*command, "--text", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err
        assert not list(tmp_path.glob(f"{name}-out*"))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_mixture_with_narrow_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix with other groups, and `transformers` would not open the result."""
    changes = {**EXPERTS, "moe_intermediate_size": 48}
    monkeypatch.setitem(MODELS, "narrow", ("Qwen3Moe", changes))
    folder = make("narrow", tmp_path / "model")
    monkeypatch.setattr(WatchedLLM, "__init__", lambda *_: pytest.fail("its weights were loaded"))
    with pytest.raises(ModelError, match="rows of 48 numbers have none of 32 or more"):
        quantize(str(folder), tmp_path / "out", FEW, progress=False)


def test_a_text_without_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama", tmp_path / "model")
    (tmp_path / "text").write_text("text")
    text = CalibrationConfig(text=str(tmp_path / "text"), device="cpu")
    monkeypatch.setattr(WatchedLLM, "__init__", lambda *_: pytest.fail("its weights were loaded"))
    with pytest.raises(ConfigError, match="model has no tokenizer to read the text with"):
        quantize(str(folder), tmp_path / "out", text, progress=False)
    assert not list(tmp_path.glob("out*"))


def test_what_is_refused(tmp_path: Path, smollm2_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    out = tmp_path / "out"
    quantized = QuantizedModel(METHODS["awq"], tmp_path / "awq", num_hidden_layers=1).folder
    for model, says in [
        (str(smollm2_path), "is a GGUF file, and quire quantize reads Hugging Face folders"),
        (str(quantized), "is quantised already"),
        (str(tmp_path / "nothing"), "There is no model"),
    ]:
        with pytest.raises(ModelError, match=says):
            quantize(model, out, FEW, progress=False)
    with pytest.raises(ConfigError, match="exists"):
        quantize(str(folder), folder, FEW, progress=False)
    with pytest.raises(ConfigError, match="calibration_tokens must be a whole number"):
        CalibrationConfig(calibration_tokens=3)
    assert not list(tmp_path.glob("out*"))


def test_experts_in_one_tensor_stay_as_they_were(tmp_path: Path) -> None:
    """However long their rows are; and the engine opens what was written."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 80}
    MODELS["gpt-oss"] = ("GptOss", changes)
    try:
        folder = make("gpt-oss", tmp_path / "model")
    finally:
        del MODELS["gpt-oss"]
    summary = quantize(str(folder), tmp_path / "int4", FEW, progress=False)
    assert "layers (" in str(summary) and "stay as they were, model.layers.0.mlp" in str(summary)
    assert tokens(tmp_path / "int4")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.weight has numbers that are not finite"):
        quantize(str(folder), tmp_path / "int4", FEW, progress=False)
    assert not list(tmp_path.glob("int4*"))


def test_layers_that_are_not_of_the_language_model_are_named_by_patterns() -> None:
    config = config_of({"model.a.q_proj": 128}, ["tower.b", "model.gate"], ["tower.b"])
    assert config["ignore"] == ["lm_head", "model.gate", r"re:.*tower\.b$"]
    assert re.match(config["ignore"][-1].removeprefix("re:"), "model.tower.b")


def test_an_expert_is_calibrated_over_its_own_tokens_on_every_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing may wait, an expert is given all tokens; here it is not."""
    folder = make("qwen3-moe", tmp_path / "model")
    text = torch.randint(0, SHAPE["vocab_size"], (60,)).tolist()

    def hessians() -> dict[str, Tensor]:
        with WatchedLLM(folder, FEW, progress=False) as llm:
            (turn,) = llm.turns()
            llm.watch(turn, [text])
            names = {name: matrix for matrix in turn for name in matrix.notes.rows_of}
            found = {name: matrix.notes.hessian(name) for name, matrix in names.items()}
            return {name: hessian for name, hessian in found.items() if hessian is not None}

    right = hessians()
    backend = type(backend_for(torch.device("cpu")))
    monkeypatch.setattr(backend, "experts", PlainOps.experts)
    found = hessians()
    assert found.keys() == right.keys()
    for name, hessian in found.items():
        torch.testing.assert_close(hessian, right[name], rtol=1e-3, atol=1e-2)


def test_watched_products_are_those_of_the_model(tmp_path: Path) -> None:
    """And notes are what `transformers` gives each layer."""
    import transformers

    folder = make("llama", tmp_path / "model")
    text = torch.randint(0, SHAPE["vocab_size"], (60,)).tolist()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    right: dict[str, Tensor] = {}
    for name, layer in oracle.named_modules():
        if isinstance(layer, nn.Linear):

            def note(module: nn.Module, args: Any, name: str = name) -> None:
                x = args[0][0]
                first = llm.text_length if name.endswith(("q_proj", "k_proj", "v_proj")) else 0
                right[name] = x.T @ x + first * x[:1].T @ x[:1]

            layer.register_forward_pre_hook(note)
    with WatchedLLM(folder, FEW, progress=False) as llm:
        with torch.inference_mode():
            oracle(torch.tensor([text]))
        (turn,) = llm.turns()
        llm.watch(turn, [text])
        names = {name for matrix in turn for name in matrix.notes.rows_of if name in right}
        assert len(names) == 14
        for matrix in turn:
            for name in names & matrix.notes.rows_of.keys():
                found = matrix.notes.hessian(name)
                torch.testing.assert_close(found, right[name], rtol=1e-4, atol=1e-2)
