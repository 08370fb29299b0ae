"""Calls that go to one given replica.

Ray Serve chooses a replica for each call; a deployment may bring its own way of choosing. Ours is
that the caller has chosen: the first argument of a call is the id of a replica, or None for any.
`replica_registry` tells the callers which replicas there are.
"""

from __future__ import annotations

from random import choice
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

# The module, not its names: Ray copies this module into other processes, with what it holds itself.
from quire.serve import replica_registry


class TargetRouter(RequestRouter):
    """Lives in the caller's process, in a thread of Ray's."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        if pending_request is None or pending_request.args[0] is None:
            return [[choice(candidate_replicas)]]
        target = pending_request.args[0]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target:
                pending_request.routing_context.should_backoff = True
                return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(replica_registry.ReplicaGone(target))
        return [candidate_replicas]  # Ray sees that the call is done with before it takes one

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        replicas = (each.unique_id for each in self.curr_replicas)
        replica_registry.tell(str(self._deployment_id), replicas)
