"""The tiles of grouped products: those that were measured for the nearest shape (`tiles.json`)."""

from __future__ import annotations

import json
import math
from functools import cache as memoise
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

_SPARE = 8 << 10  # bytes of a program's shared memory that are not for tiles
_LEAST_STAGES = 2


class Tile(NamedTuple):
    """What a program takes at a time."""

    columns: int  # of its result; with a gate, of each half
    inner: int
    warps: int
    stages: int  # tiles on their way or in use


class Tiles(NamedTuple):
    block: int  # pairs of a program
    gate_up: Tile
    down: Tile


class FewShape(NamedTuple):
    """Of a program for few tokens."""

    together: int  # results that it computes
    tile: int  # columns that it reads together
    warps: int


class Problem(NamedTuple):
    hidden: int
    features: int
    pairs: float  # of each expert, on average


@memoise
def tiles_for(kind: str, problem: Problem, itemsize: int, device: torch.device) -> Tiles:
    """`kind` is how weights are stored, `itemsize` the bytes of an activation."""
    nearest = min(_measured()[kind], key=lambda row: _distance(row, problem))
    block = nearest["block"]
    gate_up, down = Tile(*nearest["gate_up"]), Tile(*nearest["down"])
    room = _shared_memory(device)
    return Tiles(
        block, _fitted(gate_up, 2, block, itemsize, room), _fitted(down, 1, block, itemsize, room)
    )


@memoise
def block_on_hopper(pairs: float) -> int:
    """How many pairs a block of `hopper_narrow.py` or, above 64, of `hopper_fours.py` has, where an
    expert has so many."""
    nearest = min(_measured()["mxfp4 on hopper"], key=lambda row: _times(row["pairs"], pairs))
    block: int = nearest["block"]
    return block


@memoise
def few_shapes(kind: str, hidden: int, features: int) -> tuple[FewShape, FewShape]:
    """Of the first product, and of the second."""
    nearest = min(_measured()["few"][kind], key=lambda row: _apart(row, hidden, features))
    return FewShape(*nearest["gate_up"]), FewShape(*nearest["down"])


def _distance(row: dict[str, Any], problem: Problem) -> float:
    """In powers of two, of which those of tokens decide: they say what a product is bound by."""
    apart = _apart(row, problem.hidden, problem.features)
    return apart + 4 * _times(row["pairs"], problem.pairs)


def _apart(row: dict[str, Any], hidden: int, features: int) -> float:
    return _times(row["hidden"], hidden) + _times(row["features"], features)


def _times(one: float, other: float) -> float:
    """How far apart two numbers are, in powers of two."""
    return abs(math.log2(one / other))


def _fitted(tile: Tile, halves: int, block: int, itemsize: int, room: int) -> Tile:
    """With as many stages as there is memory for."""
    stage = (halves * tile.columns + block) * tile.inner * itemsize
    return tile._replace(stages=max(_LEAST_STAGES, min(tile.stages, room // stage)))


@memoise
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 20  # the interpreter has no limit
    index = torch.cuda.current_device() if device.index is None else device.index
    most: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most - _SPARE


@memoise
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("tiles.json").read_text())
    return found
