"""`truncation: auto`: of a conversation that is too long, its oldest turns are left out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from quire.errors import PromptTooLong

T = TypeVar("T")
Messages = list[dict[str, Any]]


async def with_last_turns(messages: Messages, read: Callable[[Messages], Awaitable[T]]) -> T:
    """What `read` makes of as many turns as it takes without PromptTooLong.

    A turn begins with a message of the user's, so that no result is left without its call. The
    system's messages at the beginning stay, and so does the last turn.
    """
    first = next((i for i, each in enumerate(messages) if not _is_system(each)), len(messages))
    begins = [i for i, each in enumerate(messages) if each["role"] == "user" and i > first]
    try:
        return await read(messages)
    except PromptTooLong:
        if not begins:
            raise
    longest = await read(messages[:first] + messages[begins[-1] :])
    low, high = 0, len(begins) - 1  # from begins[high] on it fits
    while low < high:
        middle = (low + high) // 2
        try:
            longest = await read(messages[:first] + messages[begins[middle] :])
            high = middle
        except PromptTooLong:
            low = middle + 1
    return longest


def _is_system(message: dict[str, Any]) -> bool:
    return message["role"] in ("system", "developer")
