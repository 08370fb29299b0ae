"""The engine's process, its two ends in one process here, on the fake model."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest
from fake_model import check_idle, expected, greedy, make_engine
from patience import PATIENCE_S, eventually

from quire.engine.observe.introspection import engine_stats
from quire.engine.process.link import Link
from quire.engine.process.messages import (
    pack_ids,
    pack_params,
    pack_request,
    unpack_ids,
    unpack_params,
)
from quire.engine.process.request_handle import RequestFailed, RequestHandle
from quire.engine.process.worker import Worker
from quire.errors import EngineFailed
from quire.framing import FrameReader, pack
from quire.params import SamplingParams
from quire.request_options import RequestOptions

PROMPT = [3, 1, 4, 1, 5]


class Session:
    """A worker in a thread, and the socket to talk to it."""

    def __init__(self, **settings):
        self.near, far = socket.socketpair()
        self.near.settimeout(60)  # a worker that died says nothing more
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.engine = make_engine(num_blocks=1024, block_size=4, **settings)
        self.worker = Worker(self.engine, Link(far))
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.frames = FrameReader()
        self.handles: dict[int, RequestHandle] = {}
        self.answers: dict[int, dict] = {}
        self.num_frames = 0

    def _run(self):
        self.status = self.worker.run()

    def add(self, number, prompt=PROMPT, params=None, *, stream=True, queue_s=None):
        self.handles[number] = RequestHandle(number, len(prompt), asyncio.Event())
        options = RequestOptions(stream=stream, queue_s=queue_s)
        packed = pack_request(np.array(prompt), params or greedy(8), options)
        self.say(do="add", number=number, **packed)

    def say(self, **message):
        self.near.sendall(pack(message))

    def read(self):
        """One frame, or several."""
        for message in self.frames.feed(self.near.recv(1 << 16)):
            self.num_frames += 1
            drawn = message.get("drawn", [])
            for i in range(0, len(drawn), 3):
                self.handles[drawn[i]].draw(drawn[i + 1], drawn[i + 2])
            for update in message.get("updates", []):
                self.handles[update["number"]].add(update)
            for answer in message.get("answers", []):
                self.answers[answer["number"]] = answer

    def finish(self, number):
        while not self.handles[number].finished:
            self.read()
        return self.handles[number].take()

    def close(self):
        self.say(do="stop")
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def session():
    session = Session()
    yield session
    session.close()
    check_idle(session.engine)


def test_tokens_come_as_deltas_and_make_the_whole(session):
    session.add(1, params=greedy(40))
    update = session.finish(1)
    assert update.samples[0].token_ids == expected(PROMPT, 40)
    assert update.samples[0].finish_reason == "length"
    assert session.handles[1].admission.num_cached_tokens == 0


def test_each_token_is_sent_once(session):
    session.add(1, params=greedy(64))
    sizes = []
    while not session.handles[1].finished:
        data = session.near.recv(1 << 16)
        for message in session.frames.feed(data):
            sizes.append(len(message.get("drawn", [])) // 3)
            for update in message.get("updates", []):
                session.handles[1].add(update)
    last = session.handles[1].take().samples[0].token_ids
    assert sum(sizes) + len(last) == 64


def test_a_request_that_does_not_stream_is_told_of_once(session):
    session.add(1, params=greedy(20), stream=False)
    session.finish(1)
    session.add(2, params=SamplingParams(temperature=0, max_tokens=5, best_of=3), stream=False)
    update = session.finish(2)
    assert update.samples.keys() == {0}
    assert update.samples[0].token_ids == expected(PROMPT, 5)


def test_a_slow_reader_loses_nothing_and_does_not_hold_up_the_engine():
    """Nothing is read while many requests run to their ends: their updates wait, merged."""
    session = Session(max_seqs=64, budget=256)
    numbers = range(1, 41)
    prompts = {number: [number, *PROMPT] for number in numbers}
    for number in numbers:
        session.add(number, prompts[number], greedy(60))
    eventually(lambda: session.engine.commit.num_generated_tokens >= 40 * 60)
    for number in numbers:
        update = session.finish(number)
        assert update.samples[0].token_ids == expected(prompts[number], 60)
    assert session.num_frames < session.engine.commit.num_steps
    session.close()


def test_abort_frees_everything(session):
    session.add(1, params=greedy(3000))
    session.read()
    session.say(do="abort", number=1)
    session.add(2)
    session.finish(2)
    assert engine_stats(session.engine)["blocks"]["in_use"] == 0


def test_a_bad_request_is_told_and_nothing_else_happens(session):
    session.add(1, prompt=[10**6])
    while not session.handles[1].finished:
        session.read()
    with pytest.raises(RequestFailed, match="vocabulary") as caught:
        session.handles[1].take()
    assert caught.value.kind == "request"


def test_a_turn_that_does_not_come_in_time_is_given_up():
    session = Session(max_seqs=1)
    session.add(1, params=greedy(2000))
    session.read()
    session.add(2, queue_s=0.01)
    while not session.handles[2].finished:
        session.read()
    with pytest.raises(RequestFailed) as caught:
        session.handles[2].take()
    assert caught.value.kind == "queue"
    session.say(do="abort", number=1)
    session.close()


def test_calls_are_answered_between_steps(session):
    session.add(1, params=greedy(2000))
    session.read()
    session.say(do="call", number=7, name="stats", args={})
    session.say(do="call", number=8, name="no such call", args={})
    session.say(do="call", number=9, name="stats", args={"surprise": 1})
    while len(session.answers) < 3:
        session.read()
    assert session.answers[7]["value"]["requests"]["running"] == 1
    assert "error" in session.answers[8]
    says = "The engine failed (TypeError); its log has the reason."
    assert session.answers[9]["error"] == says
    session.say(do="abort", number=1)


def test_a_step_that_raises_ends_the_open_requests_and_no_other(session, monkeypatch, caplog):
    session.add(1, params=greedy(2000))
    session.read()

    def fail():
        monkeypatch.undo()
        raise KeyError(session.engine._requests["1"].sequences[0])

    monkeypatch.setattr(session.engine.scheduler, "plan", lambda suspects: fail())
    while not session.handles[1].finished:
        session.read()
    with pytest.raises(RequestFailed) as caught:
        session.handles[1].take()
    assert str(caught.value) == "The engine failed (KeyError); its log has the reason."
    assert caplog.text.count("KeyError: Sequence(") == 1
    session.add(2)
    assert session.finish(2).samples[0].token_ids == expected(PROMPT, 8)


def test_an_engine_that_cannot_go_on_tells_why_and_ends(monkeypatch):
    session = Session()

    def fail():
        raise EngineFailed("Rank 1 of 2 was killed by SIGKILL.")

    monkeypatch.setattr(session.engine, "advance", fail)
    session.add(1)
    while not session.handles[1].finished:
        session.read()
    with pytest.raises(RequestFailed, match="Rank 1 of 2 was killed") as caught:
        session.handles[1].take()
    assert caught.value.kind == "engine"
    session.thread.join(PATIENCE_S)
    assert session.status == 1


def test_it_ends_when_the_other_process_is_gone(session):
    other = Session()
    other.add(1, params=greedy(2000))
    other.near.close()
    other.thread.join(PATIENCE_S)
    assert not other.thread.is_alive()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, seed=2**63, logprobs=0, stop=["a", "b"]),
        SamplingParams(logit_bias={5: -1.5, 7: 2}, stop_token_ids=[1, 2], best_of=3, n=2),
    ],
)
def test_parameters_arrive_as_they_were(params):
    [message] = FrameReader().feed(pack({"params": pack_params(params)}))
    assert unpack_params(message["params"]) == params


def test_frames_come_out_whole_however_they_are_cut():
    messages = [{"n": number, "text": "é" * number} for number in range(50)]
    data = b"".join(map(pack, messages))
    frames, seen = FrameReader(), []
    for start in range(0, len(data), 7):
        seen += frames.feed(data[start : start + 7])
    assert seen == messages


def test_ids_arrive_as_they_were():
    ids = np.arange(100_000, dtype=np.int32)
    assert (unpack_ids(pack_ids(ids)) == ids).all()
