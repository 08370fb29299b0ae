"""What the ranks tell each other: two frames (`quire.framing`), never pickle.

    head: JSON | body: the raw bytes of arrays, one behind the other

A head says what to `do`, and of which types and shapes its arrays are. A step is told without the
parameters of its draws: rank 0 alone draws. The first message has the version of all others.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import QuireError
from quire.framing import frame, read_frame
from quire.framing import pack as pack_json
from quire.params import SamplingParams
from quire.runner.plan import GroupTables, PromptLogprobRows, StepPlan
from quire.runner.sampling.sampler import SampleRow

VERSION = 3  # raise it when a message changes

Head = dict[str, Any]
Array = npt.NDArray[Any]
Message = tuple[Head, list[Array]]

_NOT_DRAWN_HERE = SampleRow(SamplingParams(), seed=0, position=0)


class WireClosed(QuireError):
    """The other rank has gone."""


def send(sock: socket.socket, message: bytes) -> None:
    try:
        sock.sendall(message)
    except OSError as error:
        raise WireClosed(f"the other rank does not listen any more: {error}") from None


def receive(sock: socket.socket) -> Message:
    """The next message, waited for."""
    read = partial(_exactly, sock)
    return unpack(read_frame(read), read_frame(read))


def pack(head: Head, arrays: Sequence[Array] = ()) -> bytes:
    kinds = [[array.dtype.str, array.shape] for array in arrays]
    body = b"".join(array.tobytes() for array in arrays)
    return pack_json({**head, "arrays": kinds} if kinds else head) + frame(body)


def unpack(encoded: bytes, body: bytes) -> Message:
    """Arrays of their own, that may be written to."""
    head: Head = json.loads(encoded)
    arrays, at = [], 0
    for kind, shape in head.pop("arrays", ()):
        dtype = np.dtype(kind)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape).copy())
        at += count * dtype.itemsize
    return head, arrays


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except OSError as error:
            raise WireClosed(f"the other rank's socket broke: {error}") from None
        if not got:
            raise WireClosed("the other rank has closed its socket")
        view = view[got:]
    return bytes(data)


def check_version(settings: Head) -> None:
    """Refuse the first message of a rank 0 that speaks otherwise."""
    if settings.get("version") != VERSION:
        raise QuireError(
            f"Rank 0 speaks version {settings.get('version')} of the ranks' messages and this rank "
            f"version {VERSION}; install the same version of Quire for all ranks."
        )


def step_message(plan: StepPlan, num_drawn: int) -> Message:
    """The step for ranks that do not draw, fed by some of `num_drawn` tokens of the one before."""
    head = {
        "do": "step",
        "draws": len(plan.samples),
        "fed": num_drawn if len(plan.fed_rows) else 0,
        "judged": [[rows.first_row, len(rows.next_ids)] for rows in plan.prompt_logprobs],
    }
    arrays: list[Array] = [plan.token_ids, plan.starts, plan.counts]
    arrays += [plan.sample_rows, plan.fed_rows, plan.fed_from, plan.adapter_slots]
    arrays += [tables.block_tables for tables in plan.tables]
    shifted = [tables.firsts for tables in plan.tables if tables.firsts is not None]
    if shifted:
        head["shifted"] = [tables.firsts is not None for tables in plan.tables]
    return head, [*arrays, *shifted]


def step_in(head: Head, arrays: list[Array]) -> StepPlan:
    token_ids, starts, counts, sample_rows, fed_rows, fed_from, adapter_slots, *by_group = arrays
    return StepPlan(
        token_ids=token_ids,
        starts=starts,
        counts=counts,
        tables=_tables_in(by_group, head.get("shifted", ())),
        samples=[_NOT_DRAWN_HERE] * head["draws"],
        sample_rows=sample_rows,
        prompt_logprobs=[
            PromptLogprobRows(first, np.zeros(count, dtype=np.int32), 0)
            for first, count in head["judged"]
        ],
        fed_rows=fed_rows,
        fed_from=fed_from,
        adapter_slots=adapter_slots,
    )


def _tables_in(arrays: list[Array], shifted: Sequence[bool]) -> tuple[GroupTables, ...]:
    """`shifted`: which groups' tables have firsts; empty where none has."""
    if not any(shifted):
        return tuple(map(GroupTables, arrays))
    tables, firsts = arrays[: len(shifted)], iter(arrays[len(shifted) :])
    return tuple(
        GroupTables(blocks, next(firsts) if is_shifted else None)
        for blocks, is_shifted in zip(tables, shifted, strict=True)
    )
