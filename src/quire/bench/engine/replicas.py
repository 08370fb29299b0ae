"""Conversations over several replicas: what each way of routing leaves to compute.

Groups of conversations begin with a system prompt of their own. Each turn is everything said so
far and a new question; the answers are the model's. All ways of routing get the same questions, on
replicas that are started anew, and find nothing of each other in a store that they share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.bench.engine.workloads import LARGEST_ID
from quire.bench.options import count
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.table import Row, check_json_path, publish
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.replicas.fleet import Fleet
from quire.replicas.routers import ROUTING
from quire.request_options import RequestOptions

EXAMPLES = """examples:
  quire bench replicas
  quire bench replicas --remote-cache-url redis://localhost:6379
  quire bench replicas --replicas 4 --conversations 1000 --turns 8 --concurrency 32
"""

NUMBERS = {
    "replicas": (3, "engines that share the work"),
    "conversations": (200, "conversations in all"),
    "turns": (5, "questions in each"),
    "concurrency": (8, "requests under way at a time"),
    "groups": (20, "system prompts, each shared by some conversations"),
    "system_tokens": (96, "tokens of a system prompt"),
    "question_tokens": (48, "tokens of a question"),
    "answer_tokens": (8, "tokens of an answer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    for name, (default, says) in NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        says = f"{says} (default: {default})"
        parser.add_argument(flag, type=count, default=default, metavar="N", help=says)
    parser.add_argument(
        "--routing",
        default="random,prefix",
        metavar="NAMES",
        help=f"which of {', '.join(ROUTING)} to compare, with commas (default: random,prefix)",
    )
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="figures as JSON")


@dataclass
class Talk:
    """One conversation: what has been said, and who computed its turns."""

    tokens: list[int]
    questions: list[list[int]]
    engines: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    prompt_tokens: int = 0
    cached: Counter[str] = field(default_factory=Counter)
    moves: int = 0  # turns on another replica than the one before
    moved_and_loaded: int = 0  # of these, turns that found something in the store they share
    seconds: float = 0.0

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached.total()


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    names = args.routing.split(",")
    if unknown := [name for name in names if name not in ROUTING]:
        raise ConfigError(f"There is no routing {unknown[0]!r}; there are {', '.join(ROUTING)}.")
    config = EngineConfig.create(**settings)
    announce_model(settings)

    from quire.bench.report.machine import in_words, machine_facts  # they import torch
    from quire.runner.device import choose_device

    outcomes = {name: asyncio.run(measure(config, args, name)) for name in names}
    rows = [_row(name, outcome) for name, outcome in outcomes.items()]
    store = (config.remote_cache_url or "no store").partition(":")[0]
    says = (
        f"{args.conversations} conversations of {args.turns} turns over {args.replicas} replicas, "
        f"{args.concurrency} at a time; {store}"
    )
    notes = []
    if {"random", "prefix"} <= set(outcomes):
        share = outcomes["prefix"].computed / outcomes["random"].computed
        notes.append(f"Routing by prefix computes {share:.0%} of what random routing computes.")
    machine = machine_facts(choose_device(config.device))
    result = {"benchmark": "replicas", "says": says, "rows": rows, "notes": notes}
    on = f"{config.model} on {in_words(machine)}"
    publish({**result, "on": on, "machine": machine}, args.json)
    return 0


def _row(name: str, outcome: Outcome) -> Row:
    tiers = {tier: outcome.cached[tier] for tier in ("device", "host", "ssd", "remote")}
    return {
        "routing": name,
        "prompt tokens": outcome.prompt_tokens,
        "computed": outcome.computed,
        **{tier: tokens for tier, tokens in tiers.items() if tokens},
        "moves": outcome.moves,
        "loaded": outcome.moved_and_loaded,
        "s": outcome.seconds,
    }


async def measure(config: EngineConfig, args: argparse.Namespace, routing: str) -> Outcome:
    fleet = await Fleet.start(config, args.replicas, routing, progress=True)
    try:
        return await _converse(fleet, args)
    finally:
        await fleet.stop()


async def _converse(fleet: Fleet, args: argparse.Namespace) -> Outcome:
    outcome, salt = Outcome(), uuid.uuid4().hex
    talks = _talks(args)
    params = SamplingParams(temperature=0, max_tokens=args.answer_tokens, ignore_eos=True)
    # Turn by turn: between two turns of one conversation all others have theirs.
    due = list(itertools.chain.from_iterable([talks] * args.turns))
    bar = runs_bar("conversations", len(due), "turn")
    free = asyncio.Semaphore(args.concurrency)
    turns = {id(talk): asyncio.Lock() for talk in talks}

    async def turn(talk: Talk) -> None:
        async with turns[id(talk)], free:
            await _turn(fleet, talk, params, salt, outcome)
        bar.update()

    started = time.perf_counter()
    await asyncio.gather(*map(turn, due))
    outcome.seconds = time.perf_counter() - started
    bar.close()
    return outcome


async def _turn(
    fleet: Fleet, talk: Talk, params: SamplingParams, salt: str, outcome: Outcome
) -> None:
    talk.tokens += talk.questions.pop(0)
    changed = asyncio.Event()
    prompt = np.array(talk.tokens, dtype=np.int32)
    handle = fleet.submit(prompt, params, RequestOptions(cache_salt=salt), changed=changed)
    try:
        while not handle.finished:
            await changed.wait()
            changed.clear()
        update = handle.take()
    finally:
        fleet.close(handle)
    assert update is not None and handle.admission is not None
    talk.tokens += update.samples[0].token_ids
    cached = handle.admission.cached_tokens_by_tier
    outcome.prompt_tokens += len(prompt)
    outcome.cached.update(cached)
    if talk.engines and talk.engines[-1] != handle.engine:
        outcome.moves += 1
        outcome.moved_and_loaded += "remote" in cached
    talk.engines.append(handle.engine)


def _talks(args: argparse.Namespace) -> list[Talk]:
    """The same whenever they are made."""
    draw = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        words: list[int] = draw.integers(0, LARGEST_ID, length).tolist()
        return words

    systems = [text(args.system_tokens) for _ in range(args.groups)]
    return [
        Talk(
            list(systems[number % args.groups]),
            [text(args.question_tokens) for _ in range(args.turns)],
        )
        for number in range(args.conversations)
    ]
