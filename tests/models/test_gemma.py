"""Gemma beyond its logits: the type of its scale, and checkpoints that hold more than text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from families import CASES, SHAPE, Oracle
from paged import PagedModel
from safetensors.torch import load_file, save_file

from quire.kernels.backend import backend_for
from quire.models.gemma import GemmaDecoder
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_in_the_models_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """The root of 48 has no short form in any of them."""
    oracle = Oracle("gemma3", tmp_path)
    ours = build_model(open_model(str(tmp_path)), dtype, CPU, progress=False)
    theirs = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    ids = torch.tensor(oracle.ids)
    decoder = ours.model
    assert isinstance(decoder, GemmaDecoder)
    with torch.no_grad():
        assert torch.equal(decoder.embed(ids), theirs.model.embed_tokens(ids))


NAMES = {
    "of transformers 4": ("language_model.model.", ""),
    "of transformers 5": ("model.language_model.", "model."),
}


@pytest.mark.parametrize("generation", NAMES)
def test_the_text_model_out_of_one_that_sees(
    tmp_path: Path, generation: str, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = Oracle("gemma3", tmp_path)
    text, other = NAMES[generation]
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {text + name.removeprefix("model."): t for name, t in tensors.items()}
    renamed[f"{other}vision_tower.vision_model.embeddings.patch_embedding.bias"] = torch.zeros(3)
    renamed[f"{other}multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3, 4)
    save_file(renamed, tmp_path / "model.safetensors")
    nested = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with caplog.at_level(logging.WARNING, "quire"):
        model = build_model(open_model(str(tmp_path)), torch.float32, CPU, progress=False)
    assert caplog.messages == ["2 tensors are not of the language model, and are not loaded."]
    paged = PagedModel(model, backend_for(CPU), block_size=16)
    oracle.check(paged.step({"a": oracle.ids})["a"], 0)


def test_one_saved_by_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**{**SHAPE, **CASES["gemma3"][1]})
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = list(range(5, 45))
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    model = build_model(open_model(str(tmp_path)), torch.float32, CPU, progress=False)
    logits = PagedModel(model, backend_for(CPU), block_size=16).step({"a": ids})["a"]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
