"""Stored responses: found by their tenant alone, and never more than the settings allow."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.server.errors import ApiError
from quire.api.server.keys import Tenant
from quire.api.server.responses.items import read_input
from quire.api.server.responses.store import ResponseStore, StoredResponse, TenantResponses
from quire.api.server.settings import ServerConfig

ONE, TWO = Tenant("1", "one"), Tenant("2", "two")


def find(item_id: str) -> dict[str, Any]:
    raise AssertionError(item_id)


def record(name: str, text: str = "", previous: StoredResponse | None = None) -> StoredResponse:
    made = StoredResponse.of(name, read_input(text or f"ask {name}", find), previous)
    [said] = read_input([{"role": "assistant", "content": f"say {name}"}], find)
    made.end({"id": name, "output": [said]})
    return made


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_a_conversation_is_that_of_all_responses_before() -> None:
    stored = TenantResponses(10, 10**6)
    first = record("a")
    second = record("b", previous=first)
    for each in (first, second):
        stored.add(each)
    assert texts(stored.get("b").conversation()) == ["ask a", "say a", "ask b", "say b"]
    assert texts(stored.get("b").input_items()) == ["ask a", "say a", "ask b"]
    item_id = second.conversation()[1]["id"]
    assert texts([stored.item(item_id)]) == ["say a"]
    stored.remove("a")
    assert texts(stored.get("b").input_items()) == ["ask a", "say a", "ask b"]
    for look in (lambda: stored.get("a"), lambda: stored.item(item_id)):
        with pytest.raises(ApiError) as caught:
            look()
        assert caught.value.status == 404


def test_texts_come_back_as_they_were() -> None:
    strange = 'half \ud800, "é" 😀\x00'
    assert texts(record("a", strange).input_items()) == [strange]


def test_tenants_are_apart() -> None:
    store = ResponseStore(ServerConfig(max_stored_responses=2))
    store.of(ONE).add(record("a"))
    with pytest.raises(ApiError) as caught:
        store.of(TWO).get("a")
    assert caught.value.status == 404
    for name in "bcd":
        store.of(TWO).add(record(name))
    assert "a" in store.of(ONE)  # others take none of its room
    assert [name in store.of(TWO) for name in "bcd"] == [False, True, True]


def test_nothing_is_kept_where_nothing_may_be() -> None:
    for stored in (TenantResponses(0, 10**6), TenantResponses(10, 100)):
        stored.add(record("a"))
        assert len(stored) == stored.num_bytes == 0


def held(stored: TenantResponses, records: list[StoredResponse]) -> int:
    """Slow and obvious: the bytes of every response that is found, and of those before it."""
    kept: set[int] = set()
    num_bytes = 0
    for each in records:
        if each.id not in stored or stored.get(each.id) is not each:
            continue
        before: StoredResponse | None = each
        while before is not None and id(before) not in kept:
            kept.add(id(before))
            num_bytes += before.num_bytes
            before = before.previous
    return num_bytes


@given(data=st.data())
def test_the_bounds_hold_whatever_is_stored_continued_and_deleted(data: st.DataObject) -> None:
    max_count, max_bytes = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 30_000))
    stored = TenantResponses(max_count, max_bytes)
    records: list[StoredResponse] = []
    waiting: list[StoredResponse] = []  # read already; what they continue may go meanwhile
    for number in range(data.draw(st.integers(1, 25))):
        found = [each for each in records if each.id in stored]
        match data.draw(st.sampled_from(["add", "wait", "land", "delete"])):
            case "delete" if found:
                stored.remove(data.draw(st.sampled_from(found)).id)
            case "land" if waiting:
                stored.add(waiting.pop())
            case step:
                previous = data.draw(st.sampled_from([None, *found]))
                text = "x" * data.draw(st.integers(1, 5000))
                made = record(str(number), text, previous)
                records.append(made)
                waiting.append(made) if step == "wait" else stored.add(made)
        assert len(stored) <= max_count
        assert stored.num_bytes == held(stored, records)
        assert stored.num_bytes <= max_bytes
    for each in [each for each in records if each.id in stored]:
        assert set(texts(each.input_items())[-1]) == {"x"}
        stored.remove(each.id)
    assert stored.num_bytes == 0


def test_the_memory_taken_is_at_most_what_is_counted() -> None:
    stored = TenantResponses(10**6, 2**20)
    gc.collect()
    tracemalloc.start()
    try:
        previous = None
        for number in range(600):
            previous = record(f"resp_{number:032}", previous=previous if number % 7 else None)
            stored.add(previous)
        del previous
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stored) < 600  # so that some had to go
    assert taken <= stored.num_bytes <= 2**20
