"""Rotary positions: pairs of a head's features are turned by an angle that grows with position.

Feature `i` is paired with `i + head_dim / 2`. With cosines and signed sines laid out over the
whole head, the turn is `x * cos + swap(x) * sin`, where `swap` exchanges the two halves:

    cos:  c0 c1 .. | c0 c1 ..        sin: -s0 -s1 .. | s0 s1 ..

Some models turn only a part of each head, or pair neighbours. The product of q and k does not
depend on the order of a head's features, so theirs are put in the order above when the weights are
loaded (`rotation_order`), and what does not turn has a cosine of 1 and a sine of 0:

    turned, in halves   a0 a1 b0 b1 x0 x1 x2 x3    ┐
                                                   ├─►  a0 a1 x0 x1 | b0 b1 x2 x3
    turned, neighbours  a0 b0 a1 b1 x0 x1 x2 x3    ┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.plain import Rotation

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
FIRST_TABLE = 1024  # positions


@dataclass(frozen=True)
class RopeConfig:
    """How fast each pair of features turns. What a kind does not use stays at its default."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn, longrope: the length the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are scaled by it
    divisors: tuple[float, ...] = ()  # of each frequency, where a file brings them ready made
    # Longrope: what `divisors` are for texts up to the original length, and for longer ones.
    short_divisors: tuple[float, ...] = field(default=(), repr=False)
    long_divisors: tuple[float, ...] = field(default=(), repr=False)
    # How many features of a head turn, None: all. Like the two above it is no part of a block's
    # key, because the model's files are, and determine it.
    rotated: int | None = field(default=None, repr=False)

    def for_length(self, max_len: int) -> RopeConfig:
        """The same for texts of at most `max_len` tokens.

        Longrope has two sets of frequencies. A key in the cache cannot be turned again, so one of
        them serves texts of all lengths: the long one if a text may be longer than the original.
        """
        if self.kind != "longrope":
            return self
        is_long = max_len > self.original_positions
        return replace(self, divisors=self.long_divisors if is_long else self.short_divisors)


NO_ROPE = RopeConfig(rotated=0)  # of layers without positions


class RotaryEmbedding:
    """A table of cosines and sines by position, as long as it has had to be."""

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        self.head_dim = head_dim
        self.config = config
        self.table = torch.empty(0, 2, 1, head_dim, device="cpu")
        self._rounded = self.table  # in the type that rotations are wanted in

    def __call__(self, positions: Tensor, limit: int, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at `positions`, all below `limit`."""
        self.reserve(limit, positions.device)
        if self._rounded.dtype != dtype:
            self._rounded = self.table.to(dtype)
        rows = self._rounded.index_select(0, positions)
        return Rotation(rows[:, 0], rows[:, 1])

    def reserve(self, limit: int, device: torch.device) -> None:
        """Make the table cover positions below `limit`; it does not move until one is above."""
        if len(self.table) < limit or self.table.device != device:
            count = max(limit, 2 * len(self.table), FIRST_TABLE)
            self.table = self._rounded = self._build(count).to(device)

    def _build(self, count: int) -> Tensor:
        rotated = self.head_dim if self.config.rotated is None else self.config.rotated
        turns = inverse_frequencies(rotated, self.config)
        angles = torch.arange(count, dtype=torch.float32, device="cpu")[:, None] * turns
        cos = angles.cos() * self.config.attention_factor
        sin = angles.sin() * self.config.attention_factor
        rest = (self.head_dim - rotated) // 2
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
        return torch.cat((cos, cos, -sin, sin), dim=-1).view(count, 2, 1, self.head_dim)


def rotation_order(head_dim: int, config: RopeConfig, neighbours: bool) -> tuple[int, ...]:
    """Which feature of a checkpoint's head comes first, second, … here; (): they stay in place.

    `neighbours`: the checkpoint pairs a feature with the next one, not with one of the other half.
    """
    rotated = head_dim if config.rotated is None else config.rotated
    half, middle = rotated // 2, (rotated + head_dim) // 2
    if neighbours:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(half), range(half, rotated)
    order = (*first, *range(rotated, middle), *second, *range(middle, head_dim))
    return () if order == tuple(range(head_dim)) else order


def inverse_frequencies(rotated: int, config: RopeConfig) -> Tensor:
    """The angle each pair of features turns by from one position to the next."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated
    divisors = torch.tensor(config.divisors, dtype=torch.float32, device="cpu")
    if config.kind == "longrope":
        return 1.0 / (divisors * config.theta**exponents)
    turns = 1.0 / (config.theta**exponents)
    if config.divisors:
        turns = turns / divisors
    if config.kind == "linear":
        return turns / config.factor
    if config.kind == "llama3":
        return _llama3(turns, config)
    if config.kind == "yarn":
        return _yarn(turns, config)
    return turns


def _llama3(turns: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones left alone, those between interpolated."""
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / turns
    rotations = config.original_positions / wavelengths
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * turns / config.factor + smooth * turns


def _yarn(turns: Tensor, config: RopeConfig) -> Tensor:
    """As llama3's, but interpolated evenly over the index of the pair."""
    dim = 2 * len(turns)

    def index_of(rotations: float) -> float:
        """The pair that makes this many rotations over the original length, as a real number."""
        length = config.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(turns), dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return turns / config.factor * ramp + turns * (1 - ramp)
