"""Copying a checkpoint into a model, and saying exactly what does not fit."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.experts import Experts
from quire.layers.interleaved import interleaved
from quire.layers.weights import BadNumbers, Weight
from quire.models.causal_lm import CheckpointModel
from quire.models.checkpoints.expert_tensors import one_by_one
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.misfits import Misfits, name_in_file
from quire.models.checkpoints.tensor_views import ReorderedRows, RowSlice, Spare, StoredBytes
from quire.progress import draws_bars

log = logging.getLogger("quire")

HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints carry what is computed anyway
PIECE = 1 << 24  # numbers read at once: with those read ahead, little beside the model itself
MOST_THREADS = 8


@dataclass(frozen=True)
class Assignment:
    """A weight, and the tensor that fills its place."""

    weight: Weight
    tensor: LazyTensor
    again: bool  # another has filled it already, and must have been the same


def check_weights(
    model: CheckpointModel,
    tensors: Iterable[tuple[str, LazyTensor]],
    stored_name: Callable[[str], str] = str,
) -> None:
    """Raise `ModelError` unless these are the tensors of `model`; none is read. `stored_name` is
    what its files would call a tensor."""
    tensors = list(tensors)
    assign(model, tensors, stored_name)
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
    misfits = Misfits()
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
                fill(piece, part)
            elif not place.holds(part):
                misfits.differs(piece.weight.name, piece.tensor)
            bar.update(place.nbytes)
    misfits.refuse(model.config.architecture)


def fill(piece: Assignment, part: Tensor) -> None:
    try:
        piece.weight.fill(part)
    except BadNumbers as error:
        raise BadNumbers(name_in_file(piece.tensor, error.name), error.problem) from None


def assign(
    model: CheckpointModel,
    tensors: Iterable[tuple[str, LazyTensor]],
    stored_name: Callable[[str], str] = str,
) -> list[Assignment]:
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
    left_out: dict[str, LazyTensor] = {}
    misfits = Misfits(wanted)
    for given, tensor in one_by_one(tensors, model.transposed_experts):
        name = model.text_tensor(given)
        if name is None:
            left_out[given] = tensor
            continue
        misfits.found[name] = tensor
        weights = [wanted[name]] if name in wanted else fused.get(name, [])
        is_spare = isinstance(tensor, Spare) or HARMLESS.search(name)
        if not weights and not is_spare:
            misfits.not_wanted(given, name, tensor)
        filling = {weight.identity for weight in weights}
        again = bool(filling & filled)
        filled |= filling
        for weight in as_stored(name, weights):
            found = in_bytes(weight, tensor)
            view = as_wanted(name, weight, found)
            assigned.append(Assignment(weight, view, again))
            shape = wanted_shape(name, weight)
            if tuple(found.shape) != shape:
                misfits.does_not_fit(given, found, shape)
            elif found.dtype not in weight.dtypes:
                misfits.does_not_fit(given, found, None)
    lacking = (weight for weight in wanted.values() if weight.identity not in filled)
    misfits.lack(lacking, stored_name)
    for given in model.unexpected(left_out):
        misfits.not_wanted(given, given, left_out[given])
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


def wanted_shape(name: str, weight: Weight) -> tuple[int, ...]:
    """That of the tensor `name`, which is this weight or holds it."""
    if weight.fused is not None and name == weight.fused.name:
        return (weight.fused.rows, *weight.shape[1:])
    return weight.shape
