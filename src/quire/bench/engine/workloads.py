"""The named workloads: the same requests on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.beam_params import BeamSearchParams
from quire.errors import ConfigError
from quire.params import SamplingParams

Prompts = list[list[int]]

LARGEST_ID = 10_000

SAYS = {
    "nano": "256 requests, 100 to 1,024 tokens in and out, temperature 0.6",
    "square": "512 requests, 1,024 tokens in and out, temperature 0.6; --max-num-seqs at once",
    "prefix": "100 requests, 70 with a common prefix of 512 tokens, 64 to 256 of their own, 32 out",
    "cpu": "32 requests, 32 to 256 tokens in, 64 out",
    "stream": "1 request, 128 tokens in, 128 out",
    "beams": "16 requests, 32 to 256 tokens in, beam search of width 4, 128 out",
}


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids and how each is to be answered."""

    name: str
    prompts: Prompts
    params: Sequence[SamplingParams | BeamSearchParams]
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, unless others are given

    @property
    def says(self) -> str:
        return SAYS[self.name]

    @property
    def beam_width(self) -> int:
        """1 where no beams are searched."""
        first = self.params[0]
        return first.beam_width if isinstance(first, BeamSearchParams) else 1

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens in and out of each sequence: a request, or a beam of it."""
        pairs = zip(self.prompts, self.params, strict=True)
        lengths = [(len(prompt), params.max_tokens or 0) for prompt, params in pairs]
        return [each for each in lengths for _ in range(self.beam_width)]

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
        lengths, width = [4] * len(prompts), self.beam_width
        params = beams_of(lengths, width) if width > 1 else answers(lengths)
        return Workload(self.name, prompts, params, self.settings)


def answers(lengths: list[int], temperature: float = 0.0) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=i)
        for i, length in enumerate(lengths)
    ]


def beams_of(lengths: list[int], width: int) -> list[BeamSearchParams]:
    return [
        BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True) for length in lengths
    ]


def random_prompt(length: int, seed: int) -> list[int]:
    r = random.Random(seed)
    return [r.randint(0, LARGEST_ID) for _ in range(length)]


def nano() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, LARGEST_ID) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    lengths = [r.randint(100, 1024) for _ in range(256)]
    return Workload("nano", prompts, answers(lengths, 0.6), {"max_model_len": 4096})


def square() -> Workload:
    """What others publish of large models, at the best number of sequences at once."""
    prompts = [random_prompt(1024, seed) for seed in range(512)]
    settings = {"max_model_len": 4096, "max_num_seqs": 512}
    return Workload("square", prompts, answers([1024] * 512, 0.6), settings)


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


def beams() -> Workload:
    r = random.Random(0)
    prompts = [[r.randint(0, LARGEST_ID) for _ in range(r.randint(32, 256))] for _ in range(16)]
    return Workload("beams", prompts, beams_of([128] * 16, width=4))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nano": nano,
    "square": square,
    "prefix": prefix,
    "cpu": cpu,
    "stream": stream,
    "beams": beams,
}


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]()
