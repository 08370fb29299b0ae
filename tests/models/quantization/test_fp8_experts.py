"""Mixtures in fp8 as `transformers` 5 saves them, where scales of all experts are one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedModel
from quantized_models import SHAPE
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.backend import backend_for
from quire.layers.experts import Experts
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.tp import TensorParallel
from quire.models.source import build_model, open_model

IDS = [5, 17, 99, 3, 42, 130, 0, 77, 8, 21]
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {  # of whose projections some are numbers, as blocks do not divide them
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "num_key_value_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, **CHOICE},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 128, **CHOICE},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**CHOICE, **LATENT},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "blocks whose scales are powers of two": {"scale_fmt": "ue8m0"},
    "tensors, inputs static": {"weight_block_size": None, "activation_scheme": "static"},
}
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scale_inv"


def write(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    kind: str = "Qwen3Moe",
    original_format: bool = True,
    changes: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Save a tiny mixture that `transformers` quantises as it loads it, and return what its codes
    stand for. Only multiplying them takes a GPU."""
    import transformers
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **KINDS[kind], **(changes or {})})
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    oracle = of_kind(config).eval().float()
    oracle.save_pretrained(folder / "numbers")
    made = of_kind.from_pretrained(
        folder / "numbers",
        quantization_config=transformers.FineGrainedFP8Config(**settings),
        dtype=torch.float32,
    )
    made.save_pretrained(folder / "fp8", save_original_format=original_format)
    oracle.load_state_dict(dequantised(made.state_dict()))
    return oracle


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    found = {name: t for name, t in tensors.items() if not name.endswith("_scale_inv")}
    found = {name: t for name, t in found.items() if not name.endswith("activation_scale")}
    of_one = Fp8Dequantize(None)._dequantize_one
    for name, tensor in found.items():
        if tensor.dtype == FP8:
            found[name] = of_one(tensor, tensors[f"{name}_scale_inv"], torch.float32)
    return found


def check_logits(folder: Path, oracle: Any) -> None:
    model = build_model(open_model(str(folder)), torch.float32, CPU, progress=False)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert all(isinstance(each.gate_up, QuantizedMatrix) for each in experts)
    paged = PagedModel(model, backend_for(CPU))
    found = torch.cat([paged.step({"a": IDS[:7]})["a"], paged.step({"a": IDS[7:]})["a"]])
    with torch.inference_mode():
        right = oracle(torch.tensor([IDS])).logits[0]
    assert (found - right).abs().max() < 1e-3 * right.abs().max()


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_all_experts_in_one_tensor(
    kind: str, original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = write(monkeypatch, tmp_path, kind, original_format)
    names = load_file(tmp_path / "fp8" / "model.safetensors")
    assert any(name.endswith(".experts.gate_up_proj_scale_inv") for name in names)
    assert any(".experts.0." in name for name in names) == original_format
    check_logits(tmp_path / "fp8", oracle)


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_other_scales(
    name: str, original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS[name]
    oracle = write(monkeypatch, tmp_path, original_format=original_format, **settings)
    check_logits(tmp_path / "fp8", oracle)


@pytest.mark.parametrize("expert_parallel", [True, False])
@pytest.mark.parametrize("original_format", [True, False])
def test_two_ranks_hold_the_whole(
    original_format: bool,
    expert_parallel: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"moe_intermediate_size": 256}
    write(monkeypatch, tmp_path, "Qwen3Moe", original_format, changes)
    ranks = [TensorParallel(rank, 2, expert_parallel=expert_parallel) for rank in range(2)]
    whole, *halves = (down_of(tmp_path / "fp8", tp) for tp in (TensorParallel(), *ranks))
    assert torch.equal(torch.cat(halves, 0 if expert_parallel else 1), whole)


def down_of(folder: Path, tp: TensorParallel) -> Tensor:
    """The numbers of a layer's experts."""
    model = build_model(open_model(str(folder)), torch.float32, CPU, False, tp)
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    assert isinstance(experts.down, QuantizedMatrix)
    return experts.down.dense()


@pytest.mark.parametrize("original_format", [True, False])
def test_experts_that_blocks_do_not_divide_are_numbers(
    original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"moe_intermediate_size": 96}
    oracle = write(monkeypatch, tmp_path, "Qwen3Moe", original_format, changes)
    model = build_model(open_model(str(tmp_path / "fp8")), torch.float32, CPU, progress=False)
    paged = PagedModel(model, backend_for(CPU))
    with torch.inference_mode():
        right = oracle(torch.tensor([IDS])).logits[0]
    assert (paged.step({"a": IDS})["a"] - right).abs().max() < 1e-3 * right.abs().max()


@pytest.mark.parametrize("original_format", [True, False])
def test_a_block_of_gate_and_up(
    original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, tmp_path, "Qwen3Moe", original_format, {"moe_intermediate_size": 192})
    with pytest.raises(ModelError, match=r"\.experts\.gate_up_proj_scale_inv has .* meet within"):
        open_model(str(tmp_path / "fp8"))


SPOILT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "an expert too few": (lambda t: t[1:], r"is \[3, 2, 2\], not those of "),
    "an expert too many": (lambda t: torch.cat([t, t[:1]]), r"is \[5, 2, 2\], not those of "),
    "a block too few": (lambda t: t[:, 1:], r"is \[4, 1, 2\], not those of 2 blocks of 128 rows"),
    "a column too few": (lambda t: t[..., 1:], "unfit: .*"),
}


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("how", SPOILT)
def test_scales_that_do_not_fit(
    how: str, original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, tmp_path, original_format=original_format)
    file = tmp_path / "fp8" / "model.safetensors"
    spoil, words = SPOILT[how]
    tensors = load_file(file)
    tensors[SCALES] = spoil(tensors[SCALES]).contiguous()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=words):
        build_model(open_model(str(file.parent)), torch.float32, CPU, progress=False)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("1.mlp.experts.2.up_proj", r"missing: [^;]*1\.mlp\.experts\.2\.up_proj\.weight"),
        ("1.mlp.experts.0.", r"missing: .*1\.mlp\.experts\.0\.down_proj\.weight"),
        ("1.mlp.experts.3.", r"scale_inv is .*, not those of as many experts as there are"),
        ("1.mlp.experts.", r"missing: .*1\.mlp\.experts\.0\.down_proj\.weight"),
    ],
)
def test_scales_of_no_codes(
    gone: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, tmp_path)
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if gone not in n}, file)
    with pytest.raises(ModelError, match=words) as refused:
        build_model(open_model(str(file.parent)), torch.float32, CPU, progress=False)
    assert "experts, not" not in str(refused.value)
