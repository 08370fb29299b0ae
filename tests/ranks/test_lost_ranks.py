"""A rank that dies, fails or stands still: one clear error, in seconds, and nothing is left."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from itertools import count

import processes
import pytest
from patience import PATIENCE_S, eventually
from tiny_llm import ids
from tiny_ranks import open_ranks, ranks_in_threads, write_weights

from quire import SamplingParams
from quire.engine import build
from quire.errors import ConfigError, EngineFailed, ModelError
from quire.ranks import watchdog
from quire.ranks.follower_rank import FollowerRank
from quire.ranks.leader import Ranks
from quire.ranks.process import Follower

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [ids(20, salt=i) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder, tmp_path):
    """With tiers, whose memory the ranks share."""
    before = set(os.listdir("/dev/shm"))
    settings = {"num_blocks": 256, "ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB"}
    with open_ranks(folder, 2, **settings) as llm:
        yield llm
        [follower] = llm.engine.runner.ranks.followers
    assert follower.process.poll() is not None
    assert set(os.listdir("/dev/shm")) <= before


def fail(llm, says):
    """Generate until it fails, and once more, which fails for the same reason."""
    with pytest.raises(EngineFailed, match=says) as failed:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    with pytest.raises(EngineFailed) as again:
        llm.generate(PROMPTS[0], LONG, use_tqdm=False)
    assert str(again.value) == str(failed.value)


def test_a_rank_that_is_killed_at_work_and_another_engine_that_goes_on(llm, folder):
    [follower] = llm.engine.runner.ranks.followers
    advance, steps = llm.engine.advance, count()

    def advance_and_kill():
        if next(steps) == 10:
            follower.process.kill()
        return advance()

    llm.engine.advance = advance_and_kill
    with open_ranks(folder, 2, num_blocks=256) as other:
        wanted = other.generate(PROMPTS[0], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        fail(llm, r"^Rank 1 of 2 was killed by SIGKILL; the engine has ended, start a new one\.$")
        other.reset_prefix_cache()
        again = other.generate(PROMPTS[0], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert again == wanted
        fail_by_itself(other)


def fail_by_itself(llm):
    """The rank says why; and the engine knows, though no request is there."""
    llm.engine.runner.ranks.tell({"do": "an unknown thing"})
    why = r"^Rank 1 of 2 failed: AttributeError \(its log has the reason\);"
    with pytest.raises(EngineFailed, match=why):
        eventually(llm.engine.check)


def test_what_fails_on_rank_0_ends_the_others(llm, monkeypatch):
    def broken(*_):
        raise MemoryError("a test's")

    monkeypatch.setattr(llm.engine.runner.model, "forward", broken)
    step = "a step of 80 tokens of 4 sequences"
    fail(llm, rf"^Rank 0 of 2 failed in {step}: MemoryError \(its log has the reason\); the engine")


def test_a_rank_that_stands_still(folder, monkeypatch):
    monkeypatch.setattr(watchdog, "STUCK_S", 4.0)
    with open_ranks(folder, 2, num_blocks=256) as llm:
        processes.stop(llm.engine.runner.ranks.followers[0].process)
        where = r"rank 0: all-reduce, rank 1: silent"
        fail(llm, rf"^The ranks have been stuck in a step of 80 tokens .* for 4 s \({where}\);")


def test_a_rank_that_is_killed_as_all_meet(folder, monkeypatch):
    """It has loaded its part, and rank 0 waits for it where nothing can be interrupted."""
    lost = []

    class Unlucky(Ranks):
        def hear(self, what):
            said = super().hear(what)
            if what == "loaded":
                process = self.followers[0].process
                processes.stop(process)
                threading.Timer(0.5, process.kill).start()
                lost.append(process)
            return said

    monkeypatch.setattr(build, "Ranks", Unlucky)
    with pytest.raises(EngineFailed, match=r"^Rank 1 of 2 was killed by SIGKILL"):
        open_ranks(folder, 2, num_blocks=64)
    assert lost[0].poll() is not None


@pytest.mark.parametrize("kind", [ModelError, ConfigError])
def test_what_a_rank_refuses_is_refused_in_its_words(folder, monkeypatch, kind):
    def refuse(_):
        raise kind("q_proj is quantised in blocks: choose a smaller tensor_parallel_size.")

    monkeypatch.setattr(FollowerRank, "build", refuse)
    with ranks_in_threads(), pytest.raises(kind, match=r"^q_proj .* tensor_parallel_size\.$"):
        open_ranks(folder, 2, num_blocks=64)


def test_a_rank_whose_leader_is_gone_ends_by_itself():
    files = [os.memfd_create("a test's") for _ in range(2)]
    follower = Follower(1, *files)
    follower.orders.close()
    follower.copies.close()
    assert follower.process.wait(PATIENCE_S) == 0
    for file in files:
        os.close(file)


class TestWatchdog:
    def test_names_a_call_that_does_not_get_on(self):
        found = queue.SimpleQueue()
        dog = watchdog.Watchdog(found.put, 0.1)
        with dog.call("slow", count().__next__), dog.call("stuck"):
            assert dog.under_way == "slow"
            assert found.get(timeout=PATIENCE_S) == "stuck"
        assert dog.under_way is None

    def test_leaves_alone_what_gets_on_or_is_over(self):
        found = queue.SimpleQueue()
        dog = watchdog.Watchdog(found.put, 0.02)
        with dog.call("busy", count().__next__):
            time.sleep(0.1)
        time.sleep(0.1)
        dog.stop()
        assert found.empty()


def test_an_llm_that_nobody_closes_takes_its_ranks_along(folder):
    llm = open_ranks(folder, 2, num_blocks=256)
    llm.generate(PROMPTS[0], SHORT, use_tqdm=False)
    [process] = [follower.process for follower in llm.engine.runner.ranks.followers]
    del llm
    gc.collect()
    assert process.wait(PATIENCE_S) == 0
