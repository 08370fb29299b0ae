"""Folders of adapters that are damaged, made for another model, or made to do harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.adapters import patterns
from quire.models.adapters.adapter import Adapter
from quire.models.adapters.config import CONFIG
from quire.models.adapters.reader import AdapterReader
from quire.models.adapters.tensors import TENSORS
from quire.models.hf_config import read_hf_config

HIDDEN, FEATURES, EXPERTS, VOCAB = 16, 24, 4, 11
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": FEATURES,
}
BASE = "base_model.model."
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "down_proj"],
}


def pair(module: str, rank: int, ins: int, outs: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(module) + rank)
    return {
        f"{BASE}{module}.lora_A.weight": torch.randn(rank, ins, generator=generator),
        f"{BASE}{module}.lora_B.weight": torch.randn(outs, rank, generator=generator),
    }


def good_tensors(rank: int = 2) -> dict[str, Tensor]:
    return {**pair(Q, rank, HIDDEN, HIDDEN), **pair(DOWN, rank, FEATURES, HIDDEN)}


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**GOOD, **config}))
    save_file(good_tensors() if tensors is None else tensors, folder / TENSORS)
    return folder


def read(
    folder: Path, raw: dict[str, Any] = LLAMA, tp: TensorParallel = SINGLE, **more: Any
) -> Adapter:
    options = {"dtype": torch.float32, "max_rank": 16, **more}
    return AdapterReader(read_hf_config(raw), tp, **options).read(folder)


def refusal(folder: Path, raw: dict[str, Any] = LLAMA, **more: Any) -> str:
    with pytest.raises(ModelError) as error:
        read(folder, raw, **more)
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 600
    return message


def test_a_good_one(tmp_path: Path) -> None:
    adapter = read(write(tmp_path))
    tensors = good_tensors()
    q, k, v = adapter.layers["model.layers.0.self_attn.qkv"]
    assert k is v is None and q is not None
    assert torch.equal(q.a, tensors[f"{BASE}{Q}.lora_A.weight"])
    assert torch.equal(q.b, 2 * tensors[f"{BASE}{Q}.lora_B.weight"])
    assert adapter.layers.keys() == {"model.layers.0.self_attn.qkv", DOWN}
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_rank_multiplies_its_own_inputs_and_one_adds_the_bias(tmp_path: Path) -> None:
    tensors = pair(DOWN, 2, FEATURES, HIDDEN)
    tensors[f"{BASE}{DOWN}.lora_B.bias"] = torch.randn(HIDDEN)
    write(tmp_path, tensors, lora_bias=True)
    parts = [read(tmp_path, tp=TensorParallel(rank, 2)).layers[DOWN][0] for rank in range(2)]
    whole = read(tmp_path).layers[DOWN][0]
    assert whole and parts[0] and parts[1]
    assert torch.equal(torch.cat([part.a for part in parts if part], dim=1), whole.a)
    assert torch.equal(parts[0].b, whole.b) and torch.equal(parts[1].b, whole.b)
    assert whole.bias is not None and parts[1].bias is None
    assert torch.equal(whole.bias, 2 * tensors[f"{BASE}{DOWN}.lora_B.bias"])


def test_experts_of_which_some_are_changed(tmp_path: Path) -> None:
    """Experts as modules: each has a rank of its own, and what it has not is zeros."""
    first, second = (f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in (1, 3))
    tensors = {**pair(first, 2, HIDDEN, FEATURES), **pair(second, 3, HIDDEN, FEATURES)}
    write(tmp_path, tensors, target_modules=["up_proj"], rank_pattern={r"3\.up_proj": 3})
    gate, up = read(tmp_path, MIXTURE).layers["model.layers.0.mlp.experts.gate_up"]
    assert gate is None and up is not None
    products = up.b @ up.a
    for expert in range(EXPERTS):
        wanted = torch.zeros(FEATURES, HIDDEN)
        for module, index, scale in ((first, 1, 2.0), (second, 3, 4 / 3)):
            if index == expert:
                a, b = (tensors[f"{BASE}{module}.lora_{each}.weight"] for each in "AB")
                wanted = b @ a * scale
        torch.testing.assert_close(products[expert], wanted)
    own = read(tmp_path, MIXTURE, TensorParallel(1, 2, expert_parallel=True))
    part = own.layers["model.layers.0.mlp.experts.gate_up"][1]
    assert part is not None and torch.equal(part.b @ part.a, products[2:])


# Contents decide, and all of them do.
def test_fingerprints(tmp_path: Path) -> None:
    def fingerprint(name: str, tensors: dict[str, Tensor] | None = None, **config: Any) -> str:
        return read(write(tmp_path / name, tensors, **config)).fingerprint

    first = fingerprint("one")
    assert fingerprint("another name") == first and len(first) == 64
    assert fingerprint("by pattern", target_modules=r".*(q|down)_proj") == first
    assert fingerprint("same scale", lora_alpha=4.0, base_model_name_or_path="x") == first
    changed = good_tensors()
    changed[f"{BASE}{Q}.lora_B.weight"][3, 1] += 1e-6
    half = {name: tensor.half() for name, tensor in good_tensors().items()}
    moved = {name.replace("layers.0", "layers.1"): each for name, each in good_tensors().items()}
    others = [
        fingerprint("other alpha", lora_alpha=5),
        fingerprint("of one module", alpha_pattern={"q_proj": 5}),
        fingerprint("rslora", use_rslora=True),
        fingerprint("one number", changed),
        fingerprint("type", half),
        fingerprint("place", moved),
    ]
    assert len({first, *others}) == 7
    assert fingerprint("one number", changed) == others[3]


REFUSED_FIELDS: dict[str, Any] = {
    "use_dora": True,
    "use_qalora": True,
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [1, 2],
    "alora_invocation_tokens": [5],
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "ensure_weight_tying": True,
    "use_something_new": "fast",
}


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_what_would_change_results_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert name in refusal(write(tmp_path, **{name: REFUSED_FIELDS[name]}))


def test_what_changes_nothing_is_read(tmp_path: Path) -> None:
    said = {"use_something_new": None, "lora_dropout": 0.1, "init_lora_weights": "eva"}
    assert read(write(tmp_path, bias="none", use_dora=False, revision="main", **said)).rank == 2


WRONG_FIELDS: dict[str, list[Any]] = {
    "r": [0, -1, 257, 2.5, "8", None, True, 10**400],
    "lora_alpha": ["a", None, [4], 1e300],
    "use_rslora": [1, "true"],
    "target_modules": [5, [5], {"q_proj": 1}, "(", "x" * 20_000],
    "exclude_modules": [5, "["],
    "layers_to_transform": ["0", [-1], [0.5], True],
    "layers_pattern": [7, "lay(ers"],
    "rank_pattern": [[], {"q_proj": 0}, {"q_proj": 300}, {"(": 2}],
    "alpha_pattern": [5, {"q_proj": "much"}],
    "modules_to_save": ["lm_head", [1]],
    "target_parameters": ["experts", 1],
    "lora_bias": ["no"],
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_fields_of_a_wrong_type(name: str, tmp_path: Path) -> None:
    for value in WRONG_FIELDS[name]:
        message = refusal(write(tmp_path, **{name: value}))
        assert name in message or "pattern" in message


def test_kinds_of_adapters(tmp_path: Path) -> None:
    assert "IA3" in refusal(write(tmp_path, peft_type="IA3"))
    assert "None" in refusal(write(tmp_path, peft_type=None))


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000, '{"r": NaN'])
def test_configs_that_are_no_object(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / CONFIG).write_text(text)
    assert CONFIG in refusal(tmp_path)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    assert CONFIG in refusal(tmp_path / "nowhere")
    write(tmp_path)
    content = (tmp_path / TENSORS).read_bytes()
    for size in (0, 4, 8, 100, len(content) - 1):
        (tmp_path / TENSORS).write_bytes(content[:size])
        assert TENSORS in refusal(tmp_path)
    (tmp_path / TENSORS).unlink()
    assert TENSORS in refusal(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    assert "can run code" in refusal(tmp_path)
    os.mkfifo(tmp_path / TENSORS)  # which would never end
    assert TENSORS in refusal(tmp_path)


# A tensor that is too much, and what is said of it.
STRANGE = {
    "model.layers.0.self_attn.w_proj.lora_A.weight": "belongs to none",
    "model.layers.7.self_attn.q_proj.lora_A.weight": "belongs to none",
    "model.layers.0.input_layernorm.weight": "belongs to none",
    "model.layers.0.self_attn.q_proj.base_layer.lora_A.weight": "belongs to none",
    "model.layers.0.self_attn.k_proj.lora_A.weight": "does not name",
    "model.layers.1.self_attn.q_proj.lora_A.weight": "no lora_B.weight beside it",
    "model.layers.0.self_attn.q_proj.lora_B.bias": "does not speak of",
    "model.layers.0.self_attn.q_proj.lora_embedding_A": "does not speak of",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "no tensor of a LoRA",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": "belongs to none",
    "../../etc/passwd": "no tensor of a LoRA",
    "../../model.layers.0.self_attn.q_proj.lora_A.weight": "belongs to none",
    "x" * 10_000 + ".weight": "no tensor of a LoRA",
    "lm_head.weight": "does not name",
}


@pytest.mark.parametrize("name", STRANGE, ids=lambda name: name[-40:])
def test_tensors_that_belong_to_nothing(name: str, tmp_path: Path) -> None:
    shape = (VOCAB, HIDDEN) if name.startswith("lm_head") else (2, HIDDEN)
    write(tmp_path, {**good_tensors(), BASE + name: torch.zeros(shape)})
    message = refusal(tmp_path)
    assert STRANGE[name] in message and name[:40] in message


def test_names_without_the_prefix(tmp_path: Path) -> None:
    tensors = {name.removeprefix(BASE): each for name, each in good_tensors().items()}
    assert "no tensor of a LoRA" in refusal(write(tmp_path, tensors))


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_shapes_that_do_not_fit(part: str, tmp_path: Path) -> None:
    name = f"{BASE}{DOWN}.{part}.weight"
    for shape in ((3, 3), (2,), (0, FEATURES), (2, FEATURES, 1), (), (1 << 20, 1)):
        assert name in refusal(write(tmp_path, {**good_tensors(), name: torch.zeros(shape)}))


def test_numbers_that_are_none(tmp_path: Path) -> None:
    name = f"{BASE}{Q}.lora_B.weight"
    for strange in (torch.nan, torch.inf):
        tensors = good_tensors()
        tensors[name][0, 0] = strange
        assert f"{name} is not finite" in refusal(write(tmp_path, tensors))
    tensors = good_tensors()
    tensors[name][0, 0] = 60_000.0  # which the scale takes past what float16 has
    write(tmp_path, tensors)
    assert f"{name} is not finite in float16" in refusal(tmp_path, dtype=torch.float16)
    tensors[name] = tensors[name].to(torch.int32)
    assert name in refusal(write(tmp_path, tensors))


def test_ranks(tmp_path: Path) -> None:
    assert read(write(tmp_path, good_tensors(16), r=16)).rank == 16
    message = refusal(write(tmp_path, good_tensors(17), r=17))
    assert "max_lora_rank=16" in message and "max_lora_rank=17" in message
    assert f"{Q}.lora_A.weight is [2, 16], not [4, 16]" in refusal(write(tmp_path, r=4))
    assert read(write(tmp_path, good_tensors(256), r=256), max_rank=256).rank == 256


def test_whole_modules(tmp_path: Path) -> None:
    name = f"{BASE}lm_head.weight"
    larger = {**good_tensors(), name: torch.zeros(VOCAB + 1, HIDDEN)}
    assert name in refusal(write(tmp_path, larger, modules_to_save=["lm_head"]))
    assert "lm_head.weight" in refusal(write(tmp_path, modules_to_save=["lm_head"]))
    norm = {**good_tensors(), f"{BASE}model.norm.weight": torch.zeros(HIDDEN)}
    assert "model.norm.weight" in refusal(write(tmp_path, norm, modules_to_save=["norm"]))


def test_one_matrix_twice(tmp_path: Path) -> None:
    fused = pair("model.layers.0.self_attn.qkv_proj", 2, HIDDEN, 2 * HIDDEN)
    write(tmp_path, {**good_tensors(), **fused}, target_modules="all-linear")
    assert "twice" in refusal(tmp_path)


def test_experts_that_the_config_does_not_name(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.mlp.experts", 2 * EXPERTS, HIDDEN, 2 * FEATURES)
    for said in (None, ["experts.gate_up_proj_bias"], ["mlp.down_proj"]):
        message = refusal(write(tmp_path, tensors, target_parameters=said), MIXTURE)
        assert "model.layers.0.mlp.experts.lora_A.weight" in message
    write(tmp_path, tensors, target_parameters=["experts.down_proj"])
    assert "lora_A.weight is [8, 16], not [8, 24]" in refusal(tmp_path, MIXTURE)
    write(tmp_path, tensors, target_parameters=["mlp.experts.gate_up_proj"])
    assert read(tmp_path, MIXTURE).rank == 2


def test_patterns_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_WAIT_S", 1.0)
    endless = r"(([a-z_.0-9])+)+!"
    assert "seconds to match" in refusal(write(tmp_path, target_modules=endless))


def test_patterns_in_the_other_process_are_matched_alike() -> None:
    said, names = ["a.c", r"(x|y)z"], ["abc", "q.abc", "yz", "a.yz", "no"]
    for after_dot in (False, True):
        here = patterns.match_all(said, names, after_dot)
        assert patterns.match_in_child(said, names, after_dot) == here
    assert patterns.first_matches([r"a.*", "ab"], ["ab", "b"]) == {"ab": r"a.*"}
