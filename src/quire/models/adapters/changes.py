"""What an adapter changes of a model, held against both before a tensor is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from quire.checks import shorten
from quire.errors import ModelError
from quire.models.adapters.adapter import EMBEDDING, HEAD
from quire.models.adapters.config import CONFIG, AdapterConfig
from quire.models.adapters.targets import Rows, Targets
from quire.models.adapters.tensors import (
    BIAS,
    OF_EMBEDDING,
    OF_LINEAR,
    WHOLE,
    ModuleTensors,
    Named,
)


@dataclass(frozen=True)
class Place:
    """Where in a model the tensors of a module or parameter belong."""

    name: str  # of the module or parameter, as `peft` has it, and as patterns match it
    tensors: ModuleTensors
    rows: Sequence[Sequence[Rows]]  # for each expert; of what is no expert's, once


@dataclass(frozen=True)
class Change:
    """The two small matrices of a module or parameter, and where their product is added."""

    name: str
    a: Named
    b: Named
    bias: Named | None
    rank: int
    scale: float
    rows: Sequence[Sequence[Rows]]

    def check(self) -> None:
        """Raise unless the tensors have the shapes that the model and the config ask for."""
        outputs = sum(rows.target.weight.shape[0] for rows in self.rows[0])
        inputs, ranks = self.rows[0][0].target.weight.shape[1], self.rank * len(self.rows)
        self.a.check(ranks, inputs)
        self.b.check(outputs, ranks)
        if self.bias is not None:
            self.bias.check(outputs)


def find_changes(
    config: AdapterConfig, tensors: Collection[ModuleTensors], targets: Targets
) -> list[Change]:
    """The pairs of A and B in the file, in an order that depends on their names alone."""
    pairs = [each for each in tensors if each.parts.keys() != {WHOLE}]
    places = sorted(find_places(config, pairs, targets), key=lambda place: place.name)
    names = [place.name for place in places]
    ranks, alphas = config.ranks(names), config.alphas(names)
    changes = []
    for place in places:
        name, found = place.name, place.tensors
        of_embedding = place.rows[0][0].target.layer == EMBEDDING
        a, b = OF_EMBEDDING if of_embedding else OF_LINEAR
        bias = found[BIAS] if config.lora_bias and not of_embedding else None
        scale = config.scale(ranks[name], alphas[name])
        change = Change(name, found[a], found[b], bias, ranks[name], scale, place.rows)
        refuse_others(found, {a, b, WHOLE} | ({BIAS} if bias else set()))
        change.check()
        changes.append(change)
    return changes


def find_places(
    config: AdapterConfig, pairs: Collection[ModuleTensors], targets: Targets
) -> Iterator[Place]:
    modules: list[tuple[ModuleTensors, Sequence[Rows]]] = []
    experts: dict[str, list[ModuleTensors]] = {}
    for found in pairs:
        name = targets.name(found.module)
        if name is None:  # of another part of the base model, which is not loaded either
            continue
        if name in targets.experts:
            experts.setdefault(found.module, []).append(found)
            continue
        rows = targets.find(name)
        if not rows or found.wrappers:
            raise belongs_to_nothing(found)
        modules.append((found, rows))
    yield from module_places(config, modules)
    for module, of_experts in experts.items():
        yield from expert_places(config, module, of_experts, targets)


def module_places(
    config: AdapterConfig, modules: Collection[tuple[ModuleTensors, Sequence[Rows]]]
) -> Iterator[Place]:
    ends = {found.module for found, rows in modules if rows[0].target.layer in (EMBEDDING, HEAD)}
    targeted = config.targets([found.module for found, _ in modules], ends)
    for found, rows in modules:
        if found.module not in targeted:
            raise is_not_targeted(found)
        yield Place(targeted[found.module], found, [rows])


def expert_places(
    config: AdapterConfig, module: str, of_experts: Collection[ModuleTensors], targets: Targets
) -> Iterator[Place]:
    """Each parameter of a module has a wrapper around those of the parameters before it."""
    stacked = targets.experts[targets.name(module) or ""]
    reached = [each for each in stacked.defined if config.reaches(f"{module}.{each}")]
    for found in of_experts:
        if found.wrappers >= len(reached):
            raise is_not_targeted(found)
        parameter = reached[-1 - found.wrappers]
        if parameter not in stacked.parameters:
            raise belongs_to_nothing(found)
        yield Place(f"{module}.{parameter}", found, stacked.parameters[parameter])


def find_replacements(
    config: AdapterConfig, tensors: Collection[ModuleTensors], targets: Targets
) -> dict[str, Named]:
    """The embedding or the head, where `modules_to_save` has them; by our name."""
    replaced: dict[str, Named] = {}
    for found in tensors:
        name = targets.name(found.module)
        if WHOLE not in found.parts or name is None:
            continue
        if name not in targets.vocabulary:
            raise belongs_to_nothing(found)
        found[WHOLE].check(*targets.vocabulary[name].shape)
        if found.wrappers:  # a copy of what the base model has, which was not trained
            continue
        if not config.replaces(found.module):
            raise is_not_targeted(found)
        replaced[name] = found[WHOLE]
    for name in targets.vocabulary:
        if config.replaces(name) and name not in replaced:
            raise ModelError(f"The adapter lacks {name}.weight, which modules_to_save names.")
    return replaced


def refuse_others(found: ModuleTensors, known: set[str]) -> None:
    for part, tensor in found.parts.items():
        if part not in known:
            raise ModelError(
                f"The adapter has {shorten(tensor.name)}, which {CONFIG} does not speak of."
            )


def belongs_to_nothing(found: ModuleTensors) -> ModelError:
    return ModelError(
        f"The adapter does not fit the model: {shorten(found.first)} belongs to none of the "
        f"matrices that adapters can change."
    )


def is_not_targeted(found: ModuleTensors) -> ModelError:
    return ModelError(
        f"The adapter has {shorten(found.first)}, whose module {CONFIG} does not name as one that "
        f"it changes."
    )
