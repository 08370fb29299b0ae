"""What the ranks tell each other: two frames (`quire.framing`), never pickle.

    head: JSON | body: the raw bytes of arrays, one behind the other

A head says what to `do`, and of which types and shapes its arrays are. A step is told without the
parameters of its draws: rank 0 alone draws.
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
from quire.runner.plan import PromptLogprobRows, StepPlan
from quire.runner.sampling.sampler import SampleRow

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


def step_message(plan: StepPlan, num_drawn: int) -> Message:
    """The step for those who do not draw, fed by some of `num_drawn` tokens of the one before."""
    head = {
        "do": "step",
        "draws": len(plan.samples),
        "fed": num_drawn if len(plan.fed_rows) else 0,
        "judged": [[rows.first_row, len(rows.next_ids)] for rows in plan.prompt_logprobs],
    }
    arrays = [plan.token_ids, plan.starts, plan.counts, plan.block_tables]
    return head, [*arrays, plan.sample_rows, plan.fed_rows, plan.fed_from]


def step_in(head: Head, arrays: list[Array]) -> StepPlan:
    token_ids, starts, counts, block_tables, sample_rows, fed_rows, fed_from = arrays
    return StepPlan(
        token_ids=token_ids,
        starts=starts,
        counts=counts,
        block_tables=block_tables,
        samples=[_NOT_DRAWN_HERE] * head["draws"],
        sample_rows=sample_rows,
        prompt_logprobs=[
            PromptLogprobRows(first, np.zeros(count, dtype=np.int32), 0)
            for first, count in head["judged"]
        ],
        fed_rows=fed_rows,
        fed_from=fed_from,
    )
