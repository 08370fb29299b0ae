"""How long a step takes, from the model's shape and the machine's rates.

    step  =  fixed, and for each token that is drawn
          +  matrices:   weight bytes / rate of reading  or  operations / rate of multiplying
          +  decodes:    bytes of the KV they read / rate of reading
          +  prompts:    operations of their attention / rate of those

Matrices take the longer of the two. Near the point where both are equal a real machine does not
turn as sharply: `bend` is the p of the p-norm that stands for the maximum. Where a machine was
timed, its `curve` has what else depends on a step's tokens: other kernels for few of them, say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from quire.bench.report.roofline import (
    head_values,
    operations_per_position,
    token_values,
    touched_bytes,
)
from quire.kv_groups import KVGroup
from quire.layers.formats import AllDense
from quire.models.config import ModelConfig
from quire.models.held import item_sizes
from quire.models.pool_groups import declared_groups
from quire.simulate.machine import Machine

Seconds = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]
N = TypeVar("N", float, Seconds)

ALL = 1 << 30  # tokens, of which some choose each expert
FEW = 16  # tokens: shorter chunks are computed as decodes are


@dataclass(frozen=True)
class StepCosts:
    """A model on a machine; item sizes in bytes."""

    config: ModelConfig
    machine: Machine
    itemsize: int = 2

    @cached_property
    def token_bytes(self) -> int:
        """KV of one token, over all layers."""
        values = sum(len(group.layers) * group.layer_values for group in self.groups)
        return values * self.itemsize

    @cached_property
    def weight_bytes(self) -> int:
        """In memory, the embedding too."""
        table = 0 if self.config.tie_word_embeddings else head_values(self.config)
        return round(self._touched(ALL)) + table * self.itemsize

    @cached_property
    def expert_itemsize(self) -> float:
        """Experts may be quantised where all else is not (gpt-oss)."""
        if self.config.experts is None or self.config.formats == AllDense():
            return self.itemsize
        return item_sizes(self.config, torch.bfloat16).experts

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        return declared_groups(self.config)

    def seconds(self, starts: Lengths, counts: Lengths, draws: int) -> float:
        """A step that computes `counts` tokens behind `starts`, for each of its sequences."""
        rows = int(counts.sum())
        if rows == len(counts):
            read = float(self._values_seen(starts + counts).sum())
            return self._factor(rows) * self._sum(rows, draws, read)
        few = counts <= FEW
        read = float(self._values_seen(starts[few] + counts[few]).sum())
        attention = self._attention(starts[~few], counts[~few]) / self.machine.attention
        return self._factor(rows) * (self._sum(rows, draws, read) + attention + self.machine.prompt)

    def decodes(self, starts: Lengths, num_steps: int) -> Seconds:
        """Each of the next steps, in which every sequence computes one token."""
        ends = starts[:, None] + 1 + np.arange(num_steps)
        read = self._values_seen(ends).sum(axis=0).astype(np.float64)
        seconds: Seconds = self._factor(len(starts)) * self._sum(len(starts), len(starts), read)
        return seconds

    def _factor(self, rows: int) -> float:
        if not self.machine.curve:
            return 1.0
        tokens, factors = np.array(self.machine.curve).T
        return float(np.interp(np.log(rows), np.log(tokens), factors))

    def _sum(self, rows: int, draws: int, read: N) -> N:
        """`read`: values of KV that decodes read."""
        machine = self.machine
        fixed = machine.step + draws * machine.draw
        return fixed + self._matrices(rows, draws) + read * self.itemsize / machine.kv

    def _matrices(self, rows: int, draws: int) -> float:
        config, machine = self.config, self.machine
        values = rows * token_values(config) + draws * head_values(config)
        reading = self._touched(rows) / machine.weights
        multiplying = 2 * values / machine.matrix
        longer = max(reading, multiplying)
        parts = (reading / longer) ** machine.bend + (multiplying / longer) ** machine.bend
        return float(longer * parts ** (1 / machine.bend))

    def _touched(self, rows: int) -> float:
        """Bytes of the weights that so many tokens need."""
        return touched_bytes(self.config, rows, self.itemsize, self.expert_itemsize)

    def _values_seen(self, ends: Lengths) -> Lengths:
        """How many values of KV a token sees that is the last of so many, over all layers."""
        seen = [
            len(group.layers)
            * group.layer_values
            * (ends if group.window is None else np.minimum(ends, group.window))
            for group in self.groups
        ]
        return seen[0] if len(seen) == 1 else np.sum(seen, axis=0)

    def _attention(self, starts: Lengths, counts: Lengths) -> float:
        """Operations: a product of each stream with every position that is seen."""
        stops = starts + counts
        operations = 0
        for group in self.groups:
            window = group.window
            if window is None:
                seen = (stops * (stops + 1) - starts * (starts + 1)) // 2
            else:
                full = np.maximum(stops - np.maximum(starts, window), 0)
                short = stops - full
                seen = (short * (short + 1) - starts * (starts + 1)) // 2 + full * window
            pairs = len(group.layers) * int(seen.sum())
            operations += pairs * operations_per_position(self.config)
        return float(operations)
