"""Responses that are kept, for each tenant: so many, and so many bytes; the oldest go first.

A response holds its own input and a reference to the one that it continues. That one stays in
memory, and is counted, while a response that continues it is kept, even if it can no longer be
found by its id: a conversation that goes on is never cut at its beginning.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.server.errors import ApiError
from quire.api.server.keys import Tenant
from quire.api.server.responses.event_log import EventLog
from quire.api.server.responses.items import Item
from quire.api.server.settings import ServerConfig

# Bytes that Python's objects take beside the texts; a test holds them to what is measured.
RESPONSE_OVERHEAD, ITEM_OVERHEAD = 1536, 384


@dataclass(eq=False)
class StoredResponse:
    id: str
    input: bytes  # its own items, as JSON
    item_ids: list[str]
    previous: StoredResponse | None = None  # the one that it continues
    response: bytes = b""  # as JSON; empty while it is generated in the background
    # Of one in the background:
    progress: Callable[[], dict[str, Any]] | None = None  # the response so far, until it has ended
    task: asyncio.Task[None] | None = None
    log: EventLog | None = None  # if it is streamed
    # The store's:
    num_users: int = 0  # itself, if it can be found, and the responses that continue it
    num_counted: int = 0  # bytes

    @classmethod
    def of(
        cls, response_id: str, items: Sequence[Item], previous: StoredResponse | None
    ) -> StoredResponse:
        return cls(response_id, _json(items), [item["id"] for item in items], previous)

    @property
    def num_bytes(self) -> int:
        texts = len(self.input) + len(self.response) + (self.log.num_bytes if self.log else 0)
        return texts + RESPONSE_OVERHEAD + ITEM_OVERHEAD * len(self.item_ids)

    def end(self, response: dict[str, Any]) -> None:
        self.response = _json(response)
        self.item_ids += [item["id"] for item in response["output"]]
        self.progress = self.task = None

    def as_dict(self) -> dict[str, Any]:
        """The response, as far as it has come."""
        if self.progress is not None:
            return self.progress()
        response: dict[str, Any] = json.loads(self.response)
        return response

    def input_items(self) -> list[Item]:
        """All that the model was given: the conversation before, and its own input."""
        before = self.previous.conversation() if self.previous is not None else []
        return before + list(json.loads(self.input))

    def conversation(self) -> list[Item]:
        """The same, and its output."""
        items: list[Item] = []
        for each in reversed(list(self._chain())):
            items += [*json.loads(each.input), *each.as_dict()["output"]]
        return items

    def _chain(self) -> Iterator[StoredResponse]:
        each: StoredResponse | None = self
        while each is not None:
            yield each
            each = each.previous


class TenantResponses:
    """What one tenant has stored."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._found: dict[str, StoredResponse] = {}  # by id, the oldest first
        self._by_item: dict[str, StoredResponse] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._found

    def get(self, response_id: str) -> StoredResponse:
        found = self._found.get(response_id)
        if found is None:
            raise ApiError(404, f"There is no response {response_id[:200]!r} here.")
        return found

    def item(self, item_id: str) -> Item:
        """One of the items of stored responses."""
        found = self._by_item.get(item_id)
        items = [] if found is None else [*json.loads(found.input), *found.as_dict()["output"]]
        for item in items:
            if item["id"] == item_id:
                return dict(item)
        raise ApiError(404, f"There is no stored item {item_id[:200]!r} here.", param="input")

    def add(self, record: StoredResponse) -> None:
        """Keep it, if there is room for it."""
        self._found[record.id] = record
        self._retain(record)
        self.recount(record)

    def recount(self, record: StoredResponse) -> None:
        """Count a response anew that has grown, unless it was forgotten meanwhile."""
        if record.num_users == 0:
            return
        self.num_bytes += record.num_bytes - record.num_counted
        record.num_counted = record.num_bytes
        self._by_item.update(dict.fromkeys(record.item_ids, record))
        while self._found and self._is_over():
            self.remove(next(iter(self._found)))

    def remove(self, response_id: str) -> StoredResponse:
        """Forget it; one that is still generated is cancelled."""
        record = self.get(response_id)
        del self._found[response_id]
        for item_id in record.item_ids:
            if self._by_item.get(item_id) is record:
                del self._by_item[item_id]
        if record.task is not None:
            record.task.cancel()
        self._release(record)
        return record

    def _is_over(self) -> bool:
        return len(self._found) > self._max_count or self.num_bytes > self._max_bytes

    def _retain(self, record: StoredResponse) -> None:
        """The exact inverse of `_release`: the response continued may have been forgotten since."""
        each: StoredResponse | None = record
        while each is not None:
            each.num_users += 1
            if each.num_users > 1:
                break
            each.num_counted = each.num_bytes
            self.num_bytes += each.num_counted
            each = each.previous

    def _release(self, record: StoredResponse) -> None:
        each: StoredResponse | None = record
        while each is not None:
            each.num_users -= 1
            if each.num_users > 0:
                break
            self.num_bytes -= each.num_counted
            each = each.previous


class ResponseStore:
    """By tenant: none sees another's, nor takes its room."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._tenants: dict[str, TenantResponses] = {}

    def of(self, caller: Tenant) -> TenantResponses:
        if caller.salt not in self._tenants:
            settings = self._settings
            self._tenants[caller.salt] = TenantResponses(
                settings.max_stored_responses, settings.max_stored_response_bytes
            )
        return self._tenants[caller.salt]


def _json(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")  # as `json.loads` decodes
