"""Adapters that `peft` makes on tiny models, what it computes with them, and a slow application."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from families import MIXTURES
from torch import Tensor, nn

from quire.layers.embedding import Vocabulary
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models.adapters.adapter import EMBEDDING, HEAD, Adapter, Outputs
from quire.models.causal_lm import CausalLM

STACKED = ["experts.gate_up_proj", "experts.down_proj"]  # what `transformers` 5 calls experts


def every_matrix(case: str, rank: int = 4) -> dict[str, Any]:
    """A config for adapters of all that one of the `families` can have them for."""
    config = {"r": rank, "lora_alpha": 6, "target_modules": "all-linear"}
    return {**config, "target_parameters": STACKED} if case in MIXTURES else config


class PeftAdapter:
    """An adapter of random numbers in a folder, and `peft`'s logits for a text with it."""

    def __init__(
        self, base: nn.Module, folder: Path, ids: list[int], merges: bool = True, **config: Any
    ) -> None:
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(deepcopy(base), peft.LoraConfig(**config)).eval()
            randomise(model, seed=len(str(config)))
            save(model, folder)
        self.folder = folder
        self._compute(model, ids, merges)

    def loaded(self, base: nn.Module, ids: list[int]) -> PeftAdapter:
        """The same, as `peft` loads it from the folder now."""
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(deepcopy(base), str(self.folder)).eval()
        self._compute(model, ids, merges=True)
        return self

    @torch.no_grad()
    def _compute(self, model: Any, ids: list[int], merges: bool) -> None:
        self.logits = [model(torch.tensor([ids])).logits[0]]
        if merges:
            self.merged = model.merge_and_unload()
            self.logits.append(self.merged(torch.tensor([ids])).logits[0])

    def check(self, logits: Tensor, start: int = 0) -> None:
        """Against those of the adapter beside the model, and in its weights."""
        for wanted in self.logits:
            found = wanted[start : start + len(logits)]
            torch.testing.assert_close(logits.cpu(), found, atol=1e-4, rtol=0)


def save(model: Any, folder: Path) -> None:
    """Without the card for people, whose template takes longer than all else."""
    model.create_or_update_model_card = lambda _: None
    model.save_pretrained(folder)


def randomise(model: nn.Module, seed: int) -> None:
    """B begins as zeros, and whole modules as copies: give all of them something to add."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.05)


def merge(model: CausalLM, adapter: Adapter) -> None:
    """Add all products of B and A to the weights of a dense model: slow, and obvious."""
    if adapter.embedding or adapter.replaced or HEAD in adapter.layers:
        untie(model)
    for name, whole in adapter.replaced.items():
        vocabulary(model, name).matrix.weight.copy_(whole)
    if adapter.embedding is not None:
        delta = adapter.embedding.b @ adapter.embedding.a
        vocabulary(model, EMBEDDING).matrix.weight.add_(delta.T)
    for path, outputs in adapter.layers.items():
        merge_layer(model, path, outputs)


def merge_layer(model: CausalLM, path: str, outputs: Outputs) -> None:
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, Experts):
        name = path.rpartition(".")[2]
        weights = getattr(parent, name).weight
        by_expert = weights.unflatten(0, (len(parent.mine), -1))
        add(outputs, [*by_expert.chunk(len(outputs), dim=1)])
        return
    layer = model.get_submodule(path)
    weight = layer.matrix.weight if isinstance(layer, Linear) else layer.weight
    sizes = layer.sizes if len(outputs) > 1 else [len(weight)]
    add(outputs, [*weight.split(sizes)])
    if any(output is not None and output.bias is not None for output in outputs):
        own = torch.zeros(len(weight)) if layer.bias is None else layer.bias
        biases = [None if output is None else output.bias for output in outputs]
        pairs = zip(biases, sizes, strict=True)
        added = [torch.zeros(size) if bias is None else bias for bias, size in pairs]
        layer.__dict__["bias"] = own + torch.cat(added)


def add(outputs: Outputs, weights: list[Tensor]) -> None:
    for output, weight in zip(outputs, weights, strict=True):
        if output is not None:
            weight.add_(output.b @ output.a)


def untie(model: Any) -> None:
    if model.lm_head is model.model.embed_tokens:
        head = deepcopy(model.lm_head)
        model._modules["lm_head"] = model.__dict__["lm_head"] = head


def vocabulary(model: CausalLM, name: str) -> Any:
    found = model.get_submodule(name)
    assert isinstance(found, Vocabulary)
    return found
