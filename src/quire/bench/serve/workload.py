"""Which requests are sent, and when."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from quire.bench.engine.workloads import nano
from quire.bench.request_trace import block_names, number, read_records
from quire.bench.serve.prompts import BlockPrompt, FixedPrompt, Prompt
from quire.errors import ConfigError

DEFAULT_REQUESTS = 100
DEFAULT_RATE = 1.0
Lengths = tuple[int, int]  # the least and the most


@dataclass(frozen=True, slots=True)
class Request:
    at: float  # seconds after the start
    prompt: Prompt
    num_out: int


@dataclass(frozen=True)
class ServeWorkload:
    """Requests in the order in which they are sent, and how all of them are to be answered."""

    says: str
    requests: list[Request]
    as_ids: bool
    temperature: float = 0.0
    ignore_eos: bool = False


def make_workload(args: argparse.Namespace) -> ServeWorkload:
    if args.trace is not None:
        workload = _trace_workload(args)
    elif args.workload == "nano":
        workload = _nano_workload(args)
    else:
        workload = _random_workload(args)
    asked = {"temperature": args.temperature, "ignore_eos": args.ignore_eos}
    return replace(workload, **{name: value for name, value in asked.items() if value is not None})


def _nano_workload(args: argparse.Namespace) -> ServeWorkload:
    if args.api == "chat" or args.prompts == "text":
        raise ConfigError(
            "nano has prompts of token ids; leave out --api chat and --prompts text, or choose "
            "--workload random."
        )
    load = nano()
    pairs = list(zip(load.prompts, load.lengths, strict=True))[: args.num_requests]
    rate = args.rate or math.inf
    requests = [
        Request(at, FixedPrompt(prompt), num_out)
        for at, (prompt, (_, num_out)) in zip(arrivals(rate, args.seed), pairs, strict=False)
    ]
    says = f"nano: {len(requests)} requests, 100 to 1,024 tokens in and out, {_pace(rate)}"
    return ServeWorkload(says, requests, as_ids=True, temperature=0.6, ignore_eos=True)


def _random_workload(args: argparse.Namespace) -> ServeWorkload:
    r = random.Random(args.seed)
    num, rate = args.num_requests or DEFAULT_REQUESTS, args.rate or DEFAULT_RATE
    requests = [
        Request(
            at,
            BlockPrompt((), r.randint(*args.input_len), own=f"{args.seed}-{number}"),
            r.randint(*args.output_len),
        )
        for number, at in enumerate(islice(arrivals(rate, args.seed), num))
    ]
    says = (
        f"random: {num:,} requests, {_range(args.input_len)} tokens in, "
        f"{_range(args.output_len)} out, {_pace(rate)}"
    )
    return ServeWorkload(says, requests, as_ids=args.prompts == "ids")


def _trace_workload(args: argparse.Namespace) -> ServeWorkload:
    requests = list(islice(_trace_requests(args), args.num_requests))
    if not requests:
        raise ConfigError(f"--trace {args.trace} has no requests; give another file.")
    requests.sort(key=lambda request: request.at)
    first = requests[0].at
    requests = [replace(request, at=request.at - first) for request in requests]
    says = (
        f"{args.trace}: {len(requests):,} requests in {requests[-1].at:,.0f} s, "
        f"its times × {args.time_scale:g}"
    )
    return ServeWorkload(says, requests, as_ids=args.prompts == "ids")


def _trace_requests(args: argparse.Namespace) -> Iterator[Request]:
    for count, (where, record) in enumerate(read_records(args.trace)):
        blocks = tuple(block_names(record, where))
        num_in = number(record, "input_length", where)
        num_out = number(record, "output_length", where)
        at = args.time_scale * number(record, "timestamp", where) / 1000
        num_in = min(max(1, int(num_in)), args.max_input_len or math.inf)
        num_out = min(max(1, int(num_out)), args.max_output_len or math.inf)
        prompt = BlockPrompt(blocks, int(num_in), own=f"{args.seed}-{count}")
        yield Request(at, prompt, int(num_out))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """When requests come that know nothing of each other, `rate` a second on average."""
    r = random.Random(f"arrivals {seed}")
    while math.isinf(rate):
        yield 0.0
    yield from accumulate(iter(lambda: r.expovariate(rate), None))


def _pace(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g} a second on average"


def _range(lengths: Lengths) -> str:
    least, most = lengths
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
