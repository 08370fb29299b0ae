"""What the scheduler's half tells the workers' half, with every step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prompt:
    """What a request's blocks are named after."""

    salt: str
    adapter: str


@dataclass(frozen=True)
class LoadOrder:
    """Bring what was found for a request into these blocks."""

    request: str
    blocks: list[int]


@dataclass(frozen=True)
class SaveOrder:
    """Keep these blocks, whose values this step or an earlier one has computed."""

    request: str
    prompt: Prompt
    first: int  # the place of the first of them in the request
    tokens: bytes  # their token ids, as little-endian int32
    blocks: list[int]


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
