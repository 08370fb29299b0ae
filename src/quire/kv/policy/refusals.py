"""Why a policy turned a block away: the few words that `Put.refused` has for it."""

from __future__ import annotations

from collections.abc import Hashable

from quire.kv.policy.protocol import K, Policy

KEEPS_NOTHING = "the tier has no room at all"
SHARE_REACHED = "the tenant has its share of the tier"
ALL_HELD = "full, and all of it is in use"
WORTH_LESS = "full of blocks that are worth more"
BEHIND_ANOTHER = "behind a block that was turned away"


def why_turned_away(policy: Policy[K], tenant: Hashable, num_in_use: int) -> str:
    """`num_in_use`: of the blocks that it holds, those that matches or transfers hold now."""
    if not policy.capacity:
        return KEEPS_NOTHING
    if policy.has_its_share(tenant):
        return SHARE_REACHED
    if len(policy) < policy.capacity:
        return BEHIND_ANOTHER
    return ALL_HELD if num_in_use >= len(policy) else WORTH_LESS
