"""What ranks tell each other arrives as it was sent, however it is cut."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.errors import QuireError
from quire.params import SamplingParams
from quire.ranks import cores
from quire.ranks.wire import (
    VERSION,
    WireClosed,
    check_version,
    pack,
    receive,
    send,
    step_in,
    step_message,
)
from quire.runner.plan import GroupTables, PromptLogprobRows, StepPlan
from quire.runner.sampling.sampler import SampleRow


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PLAN = StepPlan(
    token_ids=ints(5, 6, 7, 0),
    starts=ints(0, 9),
    counts=ints(3, 1),
    tables=(GroupTables(np.arange(6, dtype=np.int32).reshape(2, 3)),),
    samples=[SampleRow(SamplingParams(), seed=1, position=0)] * 2,
    sample_rows=ints(2, 3),
    prompt_logprobs=[PromptLogprobRows(0, ints(6, 7), 4)],
    fed_rows=ints(3),
    fed_from=ints(1),
)


def across(message: bytes) -> tuple[dict, list[np.ndarray]]:
    """Over a socket that takes a little at a time."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with near, far:
        thread = threading.Thread(target=send, args=(near, message))
        thread.start()
        received = receive(far)
        thread.join()
    return received


def test_a_step_arrives_without_what_only_rank_0_needs() -> None:
    arrived = step_in(*across(pack(*step_message(PLAN, num_drawn=2))))
    for name in ("token_ids", "starts", "counts", "sample_rows"):
        np.testing.assert_array_equal(getattr(arrived, name), getattr(PLAN, name))
    [tables] = arrived.tables
    np.testing.assert_array_equal(tables.block_tables, PLAN.tables[0].block_tables)
    assert tables.firsts is None
    np.testing.assert_array_equal(arrived.fed_rows, PLAN.fed_rows)
    np.testing.assert_array_equal(arrived.fed_from, PLAN.fed_from)
    assert len(arrived.samples) == 2
    [judged] = arrived.prompt_logprobs
    assert (judged.first_row, len(judged.next_ids)) == (0, 2)


@pytest.mark.parametrize("shifted", [(), (1,), (0, 2), (0, 1, 2)])
def test_every_group_has_its_tables_and_where_they_begin(shifted: tuple[int, ...]) -> None:
    sent = tuple(
        GroupTables(
            np.arange(2 * width, dtype=np.int32).reshape(2, width) + 100 * group,
            ints(group, 7) if group in shifted else None,
        )
        for group, width in enumerate((5, 2, 3))
    )
    message = step_message(replace(PLAN, tables=sent), num_drawn=2)
    arrived = step_in(*across(pack(*message))).tables
    assert len(arrived) == len(sent)
    for got, wanted in zip(arrived, sent, strict=True):
        np.testing.assert_array_equal(got.block_tables, wanted.block_tables)
        assert (got.firsts is None) == (wanted.firsts is None)
        if wanted.firsts is not None:
            np.testing.assert_array_equal(got.firsts, wanted.firsts)


def test_a_rank_refuses_another_version_of_the_messages() -> None:
    check_version({"version": VERSION})
    for other in ({}, {"version": VERSION - 1}):
        with pytest.raises(QuireError, match="same version"):
            check_version(other)


@pytest.mark.parametrize(("fed", "told"), [(ints(3), 7), (ints(), 0)])
def test_how_much_was_drawn_is_told_where_it_is_fed(fed: np.ndarray, told: int) -> None:
    head, _ = step_message(replace(PLAN, fed_rows=fed, fed_from=fed), num_drawn=7)
    assert head["fed"] == told


def test_large_and_empty_arrays() -> None:
    large = np.arange(300_000).reshape(3, -1)
    head, arrays = across(pack({"do": "x"}, [large, np.empty((0, 4), dtype=np.int32)]))
    assert head == {"do": "x"} and arrays[1].shape == (0, 4)
    np.testing.assert_array_equal(arrays[0], large)
    arrays[0][0, 0] = 1  # its own memory


def test_a_socket_that_closes_in_the_middle_is_said_so() -> None:
    near, far = socket.socketpair()
    with far:
        near.sendall(pack({"do": "x"})[:-1])
        near.close()
        with pytest.raises(WireClosed):
            receive(far)
        with pytest.raises(WireClosed):
            send(far, b"x" * (1 << 20))


def test_cores_are_dealt_out_and_given_back_in_any_order() -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert cores.take_part(2) == 2
        assert cores.take_part(8) == 1
        cores.give_back(2)
        assert torch.get_num_threads() == 1
        cores.give_back(8)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(usual)
