"""The named workloads: the same requests on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids and how each is to be answered."""

    name: str
    says: str
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def output_tokens(self) -> int:
        return sum(each.max_tokens or 0 for each in self.params)


def _answers(lengths: list[int], temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=i)
        for i, length in enumerate(lengths)
    ]


def nano() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    lengths = [r.randint(100, 1024) for _ in range(256)]
    says = "256 requests, 100 to 1,024 tokens in and out, temperature 0.6"
    return Workload("nano", says, prompts, _answers(lengths, 0.6))


def prefix() -> Workload:
    r = random.Random(0)
    common = [r.randint(0, 10000) for _ in range(512)]
    own = [[r.randint(0, 10000) for _ in range(r.randint(64, 256))] for _ in range(100)]
    shares = [True] * 70 + [False] * 30
    r.shuffle(shares)
    prompts = [common + tail if share else tail for tail, share in zip(own, shares, strict=True)]
    says = "100 requests, 70 with a common prefix of 512 tokens, 64 to 256 of their own, 32 out"
    return Workload("prefix", says, prompts, _answers([32] * 100, 0.0))


def cpu() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(32, 256))] for _ in range(32)]
    says = "32 requests, 32 to 256 tokens in, 64 out"
    return Workload("cpu", says, prompts, _answers([64] * 32, 0.0))


def stream() -> Workload:
    r = random.Random(0)
    prompt = [r.randint(0, 10000) for _ in range(128)]
    return Workload("stream", "1 request, 128 tokens in, 128 out", [prompt], _answers([128], 0.0))


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
