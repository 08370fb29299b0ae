"""Slots in equal parts, and the order in which the lines of several batches wait."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from quire.api.server.batch.slots import BatchSlots, LineSlots
from quire.api.server.keys import Tenant

ONE, TWO = Tenant("a" * 64, "one"), Tenant("b" * 64, "two")


async def take_all(part: BatchSlots) -> list[int]:
    """All slots that a batch may have now; their turns."""
    turns = []
    while True:
        waiting = asyncio.ensure_future(part.acquire())
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return turns
        turns.append(waiting.result())


def run(main: Any) -> Any:
    return asyncio.run(main)


def test_tenants_and_their_batches_have_equal_parts():
    async def main() -> list[int]:
        slots = LineSlots(12)
        with ExitStack() as stack:
            parts = [stack.enter_context(slots.share(tenant)) for tenant in (ONE, TWO, TWO)]
            return [len(await take_all(part)) for part in parts]

    assert run(main()) == [6, 3, 3]


def test_a_batch_that_begins_has_its_part_and_one_that_ends_leaves_it():
    async def main() -> tuple[list[int], ...]:
        slots = LineSlots(8)
        with slots.share(ONE) as one:
            first = await take_all(one)
            with slots.share(TWO) as two:
                second = await take_all(two)
                for _ in first[:5]:
                    one.release()
                third = await take_all(one)
                waiting = asyncio.ensure_future(one.acquire())
                await asyncio.sleep(0)
                assert not waiting.done()
            last = [await waiting, *await take_all(one)]
        return first, second, third, last

    first, second, third, last = run(main())
    assert [len(each) for each in (first, second, third, last)] == [8, 4, 1, 4]


def test_a_batch_on_its_last_lines_leaves_the_other_slots():
    async def main() -> tuple[list[int], ...]:
        slots = LineSlots(8)
        with slots.share(ONE) as one, slots.share(TWO) as two:
            first = await take_all(two)
            for _ in range(3):
                await one.acquire()
            one.ask_no_more()
            second = await take_all(two)
            one.release()
            third = await take_all(two)
            with slots.share(ONE) as also_one:
                return first, second, third, await take_all(also_one)

    found = run(main())
    assert [len(each) for each in found] == [4, 1, 1, 3]


def test_last_lines_that_do_not_end_take_no_part_of_others():
    async def main() -> list[int]:
        slots = LineSlots(8)
        with slots.share(ONE) as one:
            await take_all(one)
            one.ask_no_more()
            with slots.share(TWO) as two:
                return await take_all(two)

    assert len(run(main())) == 4


def test_each_has_a_slot_however_many_there_are():
    async def main() -> list[int]:
        slots = LineSlots(2)
        with ExitStack() as stack:
            tenants = [Tenant(str(i), str(i)) for i in range(5)]
            parts = [stack.enter_context(slots.share(tenant)) for tenant in tenants]
            return [len(await take_all(part)) for part in parts]

    assert run(main()) == [1] * 5


def test_a_newcomers_lines_stand_beside_those_that_wait():
    """32 lines of the one wait, of which 10 are answered when the other comes."""

    async def main() -> tuple[list[int], list[int], list[int]]:
        slots = LineSlots(32)
        with slots.share(ONE) as one:
            first = await take_all(one)
            for turn in first[:10]:
                one.reach(turn)
                one.release()
            with slots.share(TWO) as two, slots.share(TWO) as also_two:
                return first, await take_all(two), await take_all(also_two)

    first, second, third = run(main())
    assert first == [*range(32)]
    assert second == third == [*range(9, 9 + 16, 2)]  # each second turn, as there are two


def test_turns_go_up_so_that_no_line_waits_for_ever():
    async def main() -> list[int]:
        turns = []
        with LineSlots(1).share(ONE) as one:
            for _ in range(5):
                turns.append(await one.acquire())
                one.reach(turns[-1])
                one.release()
        return turns

    assert run(main()) == [0, 1, 2, 3, 4]
