"""What every way of routing does: it is told of replicas and their blocks, and chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.kv.events import BlockEvents


class RoutingDecision(NamedTuple):
    replica: str
    num_blocks: int  # of the prompt, that it is believed to hold


class Sent:
    """A request that is with a replica; given back to the router when it has ended."""


class Router(Protocol):
    """Plain data in and out: no clock, no threads, no waiting."""

    def join(self, replica: str) -> None:
        """It is there, and holds nothing that is known of; also after it was started again."""

    def leave(self, replica: str) -> None:
        """It is gone, and what it held with it."""

    def apply(self, replica: str, events: BlockEvents) -> None:
        """What a replica says of its blocks; one that has not joined is not listened to."""

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, float]) -> RoutingDecision:
        """The replica for a prompt with the block `keys`; one of `loads`, at least one, all joined.

        A load is the work that a replica has before it, in tokens. A replica that drains, or has
        another role, is left out.
        """

    def begin(self, replica: str, keys: Sequence[bytes]) -> Sent:
        """The request was sent there: its blocks will be there soon, for later requests."""

    def end(self, sent: Sent) -> None:
        """It is over; from now on only what the replica says of its blocks counts."""
