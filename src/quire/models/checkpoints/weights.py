"""Copying a checkpoint into a model, and saying exactly what does not fit."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.experts import Experts
from quire.layers.interleaved import interleaved
from quire.layers.weights import Weight
from quire.models.causal_lm import CheckpointModel
from quire.models.checkpoints.expert_tensors import one_by_one
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import ReorderedRows, RowSlice, Spare, StoredBytes
from quire.progress import draws_bars

log = logging.getLogger("quire")

HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints carry what is computed anyway
NAMES_SHOWN = 3  # of each list
PIECE = 1 << 24  # numbers read at once: with those read ahead, little beside the model itself
MOST_THREADS = 8


@dataclass
class Misfits:
    """Names that keep a checkpoint from being a model's."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.unfit)

    def refuse(self, architecture: str) -> None:
        lists = ("missing", self.missing), ("unexpected", self.unexpected), ("unfit", self.unfit)
        if found := "; ".join(f"{what}: {some_of(names)}" for what, names in lists if names):
            raise ModelError(
                f"The weights are not those of the {architecture} that the config describes "
                f"({found}): download both again, or choose another model."
            )


@dataclass(frozen=True)
class Assignment:
    """A weight, and the tensor that fills its place."""

    weight: Weight
    tensor: LazyTensor
    again: bool  # another has filled it already, and must have been the same


def check_weights(model: CheckpointModel, tensors: Iterable[tuple[str, LazyTensor]]) -> None:
    """Raise `ModelError` unless these are the tensors of `model`; none is read."""
    tensors = list(tensors)
    assign(model, tensors)
    others = sum(model.text_tensor(name) is None for name, _ in tensors)
    said = model.left_out(others) if others and model.tp.rank == 0 else None
    if said is not None:
        log.warning(said)


def load_weights(
    model: CheckpointModel, tensors: Iterable[tuple[str, LazyTensor]], progress: bool = False
) -> None:
    """Fill all of `model`'s weights from `tensors`, in whatever order they come.

    Whether they fit is clear before anything is read. Then only this rank's parts are.
    """
    from tqdm import tqdm

    pieces = [
        replace(assignment, weight=piece)
        for assignment in assign(model, tensors)
        for piece in assignment.weight.pieces(PIECE)
    ]
    differing: dict[str, None] = {}
    with tqdm(
        total=sum(piece.weight.place.nbytes for piece in pieces),
        desc="loading",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not (progress and draws_bars()),
    ) as bar:
        for piece, part in zip(pieces, read_ahead(pieces), strict=True):
            place = piece.weight.place
            if not piece.again:
                piece.weight.fill(part)
            elif not place.holds(part):
                differing[f"{piece.weight.name} differs from the tensor it is tied to"] = None
            bar.update(place.nbytes)
    Misfits(unfit=list(differing)).refuse(model.config.architecture)


def assign(model: CheckpointModel, tensors: Iterable[tuple[str, LazyTensor]]) -> list[Assignment]:
    """Every tensor with the weight that it fills; nothing is missing and nothing is left over."""
    wanted: dict[str, Weight] = {}
    fused: dict[str, list[Weight]] = {}
    for weight in model.weights():
        if weight.name in wanted:
            raise ValueError(f"Two layers of the model ask for the tensor {weight.name}.")
        wanted[weight.name] = weight
        if weight.fused is not None:
            fused.setdefault(weight.fused.name, []).append(weight)
    assigned: list[Assignment] = []
    filled: set[str] = set()
    unfit: dict[str, None] = {}  # once, where it would be cut into several
    misfits = Misfits()
    for given, tensor in one_by_one(tensors, model.transposed_experts):
        name = model.text_tensor(given)
        if name is None:
            continue
        weights = [wanted[name]] if name in wanted else fused.get(name, [])
        is_spare = isinstance(tensor, Spare) or HARMLESS.search(name)
        if not weights and not is_spare:
            misfits.unexpected.append(given)
        filling = {weight.identity for weight in weights}
        again = bool(filling & filled)
        filled |= filling
        for weight in as_stored(name, weights):
            found = in_bytes(weight, tensor)
            view = as_wanted(name, weight, found)
            assigned.append(Assignment(weight, view, again))
            if problem := misfit(name, weight, found):
                unfit[f"{given} is {problem}"] = None
    misfits.unfit = list(unfit)
    misfits.missing = sorted({weight.identity for weight in wanted.values()} - filled)
    if misfits.unfit or misfits.unexpected:
        refuse_mixed_experts(model)
    misfits.refuse(model.config.architecture)
    return assigned


def refuse_mixed_experts(model: CheckpointModel) -> None:
    """Why a checkpoint may not fit, where a list of shapes would not tell."""
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            module.refuse_mixed(model.config.formats, path)


def as_stored(name: str, weights: Sequence[Weight]) -> Sequence[Weight]:
    """The weights that the tensor `name` fills; those whose rows take turns in it are one."""
    takes_turns = any(weight.fused and weight.fused.interleaved for weight in weights)
    if not takes_turns or name == weights[0].name:
        return weights
    return [interleaved(name, weights)]


def in_bytes(weight: Weight, tensor: LazyTensor) -> LazyTensor:
    """A tensor of 16 bits as a weight has it that keeps them so."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return StoredBytes(tensor) if is_half and weight.dtypes == (torch.uint8,) else tensor


def as_wanted(name: str, weight: Weight, tensor: LazyTensor) -> LazyTensor:
    """The rows of the tensor `name` that are this weight, in the order that the layer has them."""
    if weight.fused is not None and name == weight.fused.name:
        tensor = RowSlice(tensor, weight.fused.start, weight.shape[0])
    return ReorderedRows(tensor, weight.order) if weight.order else tensor


def read_ahead(pieces: Iterable[Assignment]) -> Iterator[Tensor]:
    """The parts in order; a few are read and dequantised ahead, by several threads."""
    threads = min(torch.get_num_threads(), MOST_THREADS)
    ahead: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for piece in pieces:
            ahead.append(pool.submit(piece.tensor.__getitem__, piece.weight.part))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def misfit(name: str, weight: Weight, tensor: LazyTensor) -> str | None:
    """What the tensor `name` is, if it cannot be this weight, or hold it."""
    shape = weight.shape
    if weight.fused is not None and name == weight.fused.name:
        shape = (weight.fused.rows, *shape[1:])
    if tuple(tensor.shape) != shape:
        return f"{list(tensor.shape[:4])}, not {list(shape)}"
    if tensor.dtype not in weight.dtypes:
        return str(tensor.dtype).removeprefix("torch.")
    return None


def some_of(names: Sequence[str]) -> str:
    shown = ", ".join(shorten(name) for name in names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
