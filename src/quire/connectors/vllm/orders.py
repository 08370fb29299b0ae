"""What the scheduler's half tells the workers' half, with every step."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_BLOCK = 0  # vLLM's own: what stands in a table for a block that a window has left behind

Tables = list[list[int]]


@dataclass(frozen=True)
class Prompt:
    """What a request's blocks are named after."""

    salt: str
    adapter: str


@dataclass(frozen=True)
class LoadOrder:
    """Bring what was found for a request into these blocks."""

    request: str
    first: int  # the place of the first of them in the request
    tables: Tables  # of each KV group


@dataclass(frozen=True)
class SaveOrder:
    """Keep these blocks, whose values this step or an earlier one has computed."""

    request: str
    prompt: Prompt
    first: int  # the place of the first of them in the request
    named: int  # blocks before that, which workers have named; the tokens begin behind them
    tokens: bytes  # token ids up to the last of the blocks, as little-endian int32
    tables: Tables  # of each KV group; NO_BLOCK where there is none to keep


@dataclass
class Orders:
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    # Their blocks are about to be written by others.
    preempted: list[str] = field(default_factory=list)
    # Ended requests: those whose load is under way and of no use any more, those whose blocks
    # vLLM keeps until their saves are reported, and all others.
    withdrawn: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
