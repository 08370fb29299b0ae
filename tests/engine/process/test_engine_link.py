"""What every link to an engine counts and tells, wherever the engine runs."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.process.engine_link import EngineLink
from quire.engine.process.request_handle import RequestFailed, RequestHandle


class FakeLink(EngineLink):
    is_alive = True

    def __init__(self):
        super().__init__("3")
        self.sent, self.aborted = [], []

    async def call(self, name, **args):
        return None

    def _send_request(self, handle, order):
        self.sent.append(handle.number)

    def _abort(self, handle):
        self.aborted.append(handle.number)


@pytest.fixture
def link():
    return FakeLink()


def placed(link, number, num_tokens=10, **options):
    handle = RequestHandle(number, num_tokens, asyncio.Event())
    link.place(handle, {"options": options})
    return handle


def counts(link):
    return link.num_open, link.num_waiting, link.num_waiting_tokens


def test_a_request_waits_until_it_is_admitted_and_is_open_until_it_is_closed(link):
    first, second = placed(link, 1), placed(link, 2, 5)
    assert link.sent == [1, 2] and first.engine == "3"
    assert counts(link) == (2, 2, 15)
    first.add({"number": 1, "admitted": {}})
    link._updated(first)
    assert counts(link) == (2, 1, 5)
    link.close(second)
    assert counts(link) == (1, 0, 0)
    link.close(first)
    link.close(first)
    assert counts(link) == (0, 0, 0)
    assert link.aborted == [2, 1]


def test_a_background_request_does_not_count_among_those_that_wait(link):
    handle = placed(link, 1, background=True)
    assert link.sent == [1] and counts(link) == (1, 0, 0)
    handle.add({"number": 1, "admitted": {}})
    link._updated(handle)
    link.close(handle)
    assert link.aborted == [1] and counts(link) == (0, 0, 0)


def test_only_requests_that_have_not_ended_are_aborted(link):
    handle = placed(link, 1)
    handle.add({"number": 1, "finished": True})
    link.close(handle)
    assert not link.aborted and counts(link) == (0, 0, 0)


def test_abandoned_requests_fail_and_are_aborted_once(link):
    ended, running = placed(link, 1), placed(link, 2)
    ended.add({"number": 1, "finished": True})
    link.abandon("The server ends.")
    with pytest.raises(RequestFailed, match="The server ends"):
        running.take()
    assert ended.take().finished
    link.close(running)
    assert link.aborted == [2]
