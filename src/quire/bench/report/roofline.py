"""The least time that a machine needs for a piece of work, from its copy and matrix rates.

    prompts         operations / matrix rate
    a decode step   max(weight bytes / copy rate, operations / matrix rate)
                    + KV bytes of every running sequence / copy rate

Only what must happen is counted: every weight read once a step (of experts those that its tokens
choose, all experts alike), every matrix product, the KV that attention sees. A prompt's first token
comes with the prompt, the others with a decode step each, and all sequences of a workload run
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from quire.bench.report.machine_rates import Rates
from quire.kv_groups import KVGroup
from quire.models.config import ExpertsConfig, ModelConfig
from quire.models.pool_groups import declared_groups

Chunk = tuple[int, int]  # the positions of a prompt from the first up to the second


@dataclass(frozen=True)
class Limit:
    """Seconds, by what they are spent on."""

    prompts: float = 0.0
    weights: float = 0.0
    kv: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prompts + self.weights + self.kv

    def as_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds, **asdict(self)}

    def __str__(self) -> str:
        parts = {"prompts": self.prompts, "weights": self.weights, "KV": self.kv}
        return " + ".join(f"{seconds:.3g} s {name}" for name, seconds in parts.items() if seconds)


@dataclass(frozen=True)
class Roofline:
    """A model on a machine; item sizes are in bytes, with scales, where there are some."""

    config: ModelConfig
    rates: Rates
    weight_itemsize: float
    kv_itemsize: float
    expert_itemsize: float | None = None  # of the weights of experts, where it is another

    def workload(self, chunks: Iterable[Chunk], lengths: Sequence[tuple[int, int]]) -> Limit:
        """`chunks` of prompts to compute; `lengths` in and out of each sequence."""
        steps = Counter(step for _, out in lengths for step in range(1, out))
        return Limit(
            prompts=self._operations(chunks) / self.rates.matrix,
            weights=sum(self.weights(rows) for rows in steps.values()),
            kv=sum(self._kv_bytes(inn, inn + out - 1) for inn, out in lengths) / self.rates.copy,
        )

    def stream(self) -> Limit:
        """A decode step of one sequence: the weights alone, beside which its KV is little."""
        return Limit(weights=self.weights(1))

    def prompt(self, length: int) -> Limit:
        """The first token behind a fresh prompt; a short one is bound by reading the weights."""
        operations = self._operations([(0, length)]) / self.rates.matrix
        return Limit(prompts=max(operations, self._weight_bytes(length) / self.rates.copy))

    def cached_prompt(self, length: int) -> Limit:
        """The first token behind a prompt whose KV is there, but for its last token's."""
        kv = self._kv_bytes(length - 1, length) / self.rates.copy
        return Limit(weights=self.weights(1), kv=kv)

    def weights(self, rows: int) -> float:
        """All matrices with `rows` tokens."""
        by_bytes = self._weight_bytes(rows) / self.rates.copy
        operations = 2 * rows * (token_values(self.config) + head_values(self.config))
        return max(by_bytes, operations / self.rates.matrix)

    def _operations(self, chunks: Iterable[Chunk]) -> float:
        """Matrix products of the layers, and attention: two products with every position seen."""
        config, total = self.config, 0.0
        for start, stop in chunks:
            total += 2 * (stop - start) * token_values(config)
            for group in self._groups:
                seen = len(group.layers) * positions_seen(start, stop, group.window)
                total += seen * operations_per_position(config)
        return total

    def _kv_bytes(self, start: int, stop: int) -> float:
        """Read by the decode steps at these positions."""
        values = sum(
            len(group.layers) * group.layer_values * positions_seen(start, stop, group.window)
            for group in self._groups
        )
        return float(values * self.kv_itemsize)

    @cached_property
    def _groups(self) -> tuple[KVGroup, ...]:
        return declared_groups(self.config)

    def _weight_bytes(self, rows: int) -> float:
        of_experts = self.expert_itemsize or self.weight_itemsize
        return touched_bytes(self.config, rows, self.weight_itemsize, of_experts)


def touched_values(config: ModelConfig, rows: int) -> float:
    """What a step of so many tokens reads of layers and head, if all experts are chosen equally
    often; of the embedding only a few rows are read."""
    chosen = experts_chosen(config.experts, rows) if config.experts else 0
    return layers_values(config, chosen) + head_values(config)


def touched_bytes(config: ModelConfig, rows: int, itemsize: float, expert_itemsize: float) -> float:
    """The bytes of those, where a weight of an expert may have another size than others."""
    experts, values = config.experts, touched_values(config, rows)
    if experts is None:
        return values * itemsize
    of_each = 3 * experts.features * config.hidden_size * experts.layers.count(True)
    of_experts = of_each * experts_chosen(experts, rows)
    return (values - of_experts) * itemsize + of_experts * expert_itemsize


def experts_chosen(experts: ExpertsConfig, rows: int) -> float:
    """How many of a layer's experts so many tokens go through."""
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** rows)


def token_values(config: ModelConfig) -> float:
    """What one token is multiplied with in all layers."""
    return layers_values(config, config.experts.top_k if config.experts else 0)


def head_values(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def layers_values(config: ModelConfig, num_experts: float) -> float:
    """All layers, with so many experts in each that has some."""
    features = 0.0
    experts, dense = config.experts, config.num_layers
    if experts is not None:
        dense = experts.layers.count(False)
        of_mlps = 3 * (num_experts * experts.features + experts.shared_features)
        features += experts.layers.count(True) * (experts.count + of_mlps)  # the router's, too
    mlps = config.hidden_size * (features + 3 * dense * config.intermediate_size)
    return config.num_layers * config.attention_values + mlps


def operations_per_position(config: ModelConfig) -> int:
    """Attention of a prompt's token, in one layer, with one position: products with K and V."""
    return 2 * config.num_heads * config.attended_values


def positions_seen(start: int, stop: int, window: int | None) -> int:
    """A token at position p sees p + 1 positions, itself included, or as many as the window has."""
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    full = max(stop - max(start, window), 0)
    return positions_seen(start, stop - full, None) + full * window


def fresh_chunks(prompts: Sequence[Sequence[int]], block_size: int | None) -> list[Chunk]:
    """What must be computed of each prompt: with a block size, a shared prefix only once.

    In sorted order a prompt shares most with the one before it. Its last token is always computed,
    for the answer starts there.
    """
    if block_size is None:
        return [(0, len(prompt)) for prompt in prompts]
    chunks, before = [], list[int]()
    for prompt in sorted(map(list, prompts)):
        shared = _common(before, prompt) // block_size * block_size
        chunks.append((min(shared, len(prompt) - 1), len(prompt)))
        before = prompt
    return chunks


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
