"""The named workloads: the same requests on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.params import SamplingParams

Prompts = list[list[int]]

LARGEST_ID = 10_000

SAYS = {
    "nano": "256 requests, 100 to 1,024 tokens in and out, temperature 0.6",
    "prefix": "100 requests, 70 with a common prefix of 512 tokens, 64 to 256 of their own, 32 out",
    "cpu": "32 requests, 32 to 256 tokens in, 64 out",
    "stream": "1 request, 128 tokens in, 128 out",
}


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids and how each is to be answered."""

    name: str
    prompts: Prompts
    params: list[SamplingParams]
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, unless others are given

    @property
    def says(self) -> str:
        return SAYS[self.name]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens in and out of each request."""
        pairs = zip(self.prompts, self.params, strict=True)
        return [(len(prompt), params.max_tokens or 0) for prompt, params in pairs]

    @property
    def output_tokens(self) -> int:
        return sum(out for _, out in self.lengths)

    @property
    def longest(self) -> int:
        return max(map(sum, self.lengths))

    def warm_up(self) -> Workload:
        """As many requests, cut short but for the longest prompt: steps of all sizes, soon done."""
        longest = max(self.prompts, key=len)
        prompts = [prompt if prompt is longest else prompt[:32] for prompt in self.prompts]
        return Workload(self.name, prompts, answers([4] * len(prompts), 0.0), self.settings)


def answers(lengths: list[int], temperature: float = 0.0) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=i)
        for i, length in enumerate(lengths)
    ]


def random_prompt(length: int, seed: int) -> list[int]:
    r = random.Random(seed)
    return [r.randint(0, LARGEST_ID) for _ in range(length)]


def nano() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, LARGEST_ID) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    lengths = [r.randint(100, 1024) for _ in range(256)]
    return Workload("nano", prompts, answers(lengths, 0.6), {"max_model_len": 4096})


def prefix() -> Workload:
    r = random.Random(0)
    common = [r.randint(0, LARGEST_ID) for _ in range(512)]
    own = [[r.randint(0, LARGEST_ID) for _ in range(r.randint(64, 256))] for _ in range(100)]
    shares = [True] * 70 + [False] * 30
    r.shuffle(shares)
    prompts = [common + tail if share else tail for tail, share in zip(own, shares, strict=True)]
    return Workload("prefix", prompts, answers([32] * 100))


def cpu() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, LARGEST_ID) for _ in range(r.randint(32, 256))] for _ in range(32)]
    return Workload("cpu", prompts, answers([64] * 32))


def stream() -> Workload:
    return Workload("stream", [random_prompt(128, seed=0)], answers([128]))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nano": nano,
    "prefix": prefix,
    "cpu": cpu,
    "stream": stream,
}


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]()
