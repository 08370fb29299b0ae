"""From checkpoint to parameters: single and sharded files, parts for ranks, and what cannot fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import TensorPlace
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.digest import Fingerprint
from quire.models.checkpoints.dummy import DummySource
from quire.models.checkpoints.safetensors import FolderSource
from quire.models.checkpoints.weights import load_weights
from quire.models.hf_config import read_hf_config
from quire.models.registry import family
from quire.models.source import build_model, read_whole

CPU = torch.device("cpu")
RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attention_bias": True,
}


SHAPE = {key: value for key, value in RAW.items() if key != "architectures"}


def make(tied: bool = False) -> tuple[CausalLM, dict[str, Tensor]]:
    """An empty model, and a checkpoint that fits it."""
    config = read_hf_config({**RAW, "tie_word_embeddings": tied})
    model = family(config.architecture)(config)
    names = {w.name: w.shape for w in model.weights() if w.same_as is None}
    return model, {name: torch.randn(shape) for name, shape in names.items()}


def parts(model: CausalLM) -> dict[str, Tensor]:
    places = {weight.name: weight.place for weight in model.weights()}
    return {name: place.tensor for name, place in places.items() if isinstance(place, TensorPlace)}


def test_every_tensor_reaches_its_place() -> None:
    model, tensors = make()
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, tensors.items())
    for name, place in parts(model).items():
        assert torch.equal(place, tensors[name].expand_as(place)), name
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_names_are_those_of_transformers() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).state_dict()
    _, ours = make()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_sharded_files_load_like_a_single_one(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    oracle = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    oracle.save_pretrained(tmp_path / "one")
    oracle.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (
        build_model(FolderSource(tmp_path / name), torch.float32, CPU, progress=False)
        for name in ("one", "many")
    )
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_are_converted_to_the_asked_dtype() -> None:
    _, tensors = make()
    source = Tensors(tensors)
    model = build_model(source, torch.bfloat16, CPU, progress=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.matrix.weight, tensors["lm_head.weight"].bfloat16())


class Tensors:
    """A source of what it is given."""

    fingerprint = Fingerprint("test")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.config = read_hf_config(RAW)
        self.given = tensors

    def tokenizer(self) -> None:
        return None

    def tensors(self) -> Any:
        yield from self.given.items()


def test_ranks_hold_parts_that_make_up_the_whole() -> None:
    _, tensors = make()
    shards = [
        parts(build_model(Tensors(tensors), torch.float32, CPU, False, TensorParallel(rank, 2)))
        for rank in range(2)
    ]
    for name, whole in tensors.items():
        first, second = (shard[name] for shard in shards)
        if name.endswith(("norm.weight", "o_proj.bias")):
            assert torch.equal(first, whole.expand_as(first)), name
            assert torch.equal(second, whole.expand_as(second)), name
            continue
        dim = 1 if ("o_proj" in name or "down_proj" in name) else 0
        assert first.shape[dim] < whole.shape[dim]
        assert torch.equal(torch.cat((first, second), dim), whole), name


def test_four_ranks_share_two_kv_heads() -> None:
    _, tensors = make()
    whole = tensors["model.layers.0.self_attn.k_proj.weight"]
    for rank in range(4):
        model = build_model(Tensors(tensors), torch.float32, CPU, False, TensorParallel(rank, 4))
        part = parts(model)["model.layers.0.self_attn.k_proj.weight"]
        head = rank // 2
        assert torch.equal(part, whole[16 * head : 16 * (head + 1)])


def test_missing_unexpected_and_unfit_tensors_are_named() -> None:
    model, tensors = make()
    del tensors["model.norm.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(100, 32)
    tensors["model.embed_tokens.weight"] = torch.zeros(101, 32, dtype=torch.int8)
    with pytest.raises(ModelError) as error:
        load_weights(model, tensors.items())
    message = str(error.value)
    assert "missing: model.norm.weight;" in message
    assert "unexpected: model.layers.9.mlp.up_proj.weight;" in message
    assert "lm_head.weight is [100, 32], not [101, 32]" in message
    assert "model.embed_tokens.weight is int8" in message


def test_long_lists_of_names_are_cut() -> None:
    model, _ = make()
    with pytest.raises(ModelError, match=r"and \d+ more") as error:
        load_weights(model, [])
    assert str(error.value).count("weight") < 12


def test_computed_tensors_in_old_checkpoints_are_harmless() -> None:
    model, tensors = make()
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), torch.nan)}
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, (computed | tensors).items())
    for name, place in parts(model).items():
        assert torch.equal(place, tensors[name].expand_as(place)), name
    learned = {"model.layers.0.self_attn.rotary_emb.inv_freq.weight": torch.zeros(8)}
    with pytest.raises(ModelError, match=r"unexpected: .*inv_freq\.weight"):
        load_weights(model, (learned | tensors).items())


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_may_be_stored_twice_if_it_is_the_same(head_first: bool) -> None:
    model, tensors = make(tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    head = {"lm_head.weight": embedding.clone()}
    both = {**head, **tensors} if head_first else {**tensors, **head}
    load_weights(model, both.items())
    assert torch.equal(model.lm_head.matrix.weight, embedding)
    both["lm_head.weight"][3, 4] += 1
    with pytest.raises(ModelError, match="differs from the tensor it is tied to"):
        load_weights(model, both.items())


def test_a_tied_matrix_may_have_the_heads_name() -> None:
    model, tensors = make(tied=True)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    load_weights(model, tensors.items())
    assert torch.equal(model.model.embed_tokens.matrix.weight, tensors["lm_head.weight"])


def test_an_untied_head_is_missed() -> None:
    model, tensors = make()
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load_weights(model, tensors.items())


def test_a_folder_gives_what_is_in_its_file(tmp_path: Path) -> None:
    _, tensors = make()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    given = read_whole(FolderSource(tmp_path))
    assert given.keys() == tensors.keys()
    assert all(torch.equal(given[name], tensors[name]) for name in tensors)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert [file.path for file in FolderSource(tmp_path).files] == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
def test_dummy_weights_are_finite_repeatable_and_different(tied: bool) -> None:
    source = DummySource(read_hf_config({**RAW, "tie_word_embeddings": tied}))
    one, two = (build_model(source, torch.float32, CPU, progress=False) for _ in range(2))
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all(), name
        if "norm" not in name and not name.endswith("bias"):
            assert a.std() == pytest.approx(a.shape[-1] ** -0.5, rel=0.2), name
            assert len(a.unique(dim=0)) == len(a), name
    layers = [layer.mlp.down_proj.matrix.weight for layer in one.model.layers]
    assert not torch.equal(layers[0], layers[1])
    model = family(source.config.architecture)(source.config, SINGLE)
    load_weights(model, source.tensors())
