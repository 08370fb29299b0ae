"""`truncation: auto` keeps the system's messages and as many turns as fit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.server.responses.truncation import with_last_turns
from quire.errors import PromptTooLong

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


def fitted(messages: list[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    async def read(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if sum(len(each["content"]) for each in tried) > room:
            raise PromptTooLong("too long")
        return tried

    return asyncio.run(with_last_turns(messages, read))


def plainly(messages: list[dict[str, Any]], room: int) -> list[dict[str, Any]] | None:
    """Slow and obvious: drop one turn after the other."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    tried = messages
    while sum(len(each["content"]) for each in tried) > room:
        turns = [i for i, each in enumerate(tried) if each["role"] == "user" and i > head]
        if not turns:
            return None
        tried = tried[:head] + tried[turns[0] :]
    return tried


@given(st.lists(st.tuples(ROLES, st.integers(0, 9)), min_size=1, max_size=12), st.integers(0, 40))
def test_as_many_turns_as_fit(turns: list[tuple[str, int]], room: int) -> None:
    messages = [
        {"role": role, "content": "x" * length, "n": i} for i, (role, length) in enumerate(turns)
    ]
    expected = plainly(messages, room)
    if expected is None:
        with pytest.raises(PromptTooLong):
            fitted(messages, room)
    else:
        assert fitted(messages, room) == expected
