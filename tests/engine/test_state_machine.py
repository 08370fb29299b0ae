"""Everything at once, at random: SPEC's invariants and the right tokens after every step."""

import random

import fake_model
import pytest
import torch
from drafts import ScriptedDrafter, speculate
from effort import effort
from fake_model import expected, greedy, logprobs_behind, make_engine, next_token, run, seen, step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from patience import PATIENCE_S
from plain_beams import plain_beams
from spelling import compiled, written

from quire.beam_params import BeamSearchParams
from quire.params import SamplingParams

GROUPS = ((None,), (None, 6), (None, 3, 9), (None, 5, 5), (6,), (8, 4))
FORMS = ({"regex": "[a-c]{3,5}(x|y)*"}, {"choice": ["abcd", "q0"]})


def true_tokens(sequence, token_ids, most):
    """What comes next, but for grammars and seeds; and now and then nothing."""
    tokens = token_ids.tolist()
    for _ in range(0 if len(tokens) % 5 == 0 else most):
        tokens.append(next_token(seen(tokens)))
    return tokens[len(token_ids) :]


def logprobs_seen(context):
    return logprobs_behind(seen(context))


def is_spoilt(sequence, place):
    return (place * 7 + len(sequence.request.id)) % 4 == 0


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from([6, 10, 24]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        budget=st.sampled_from([1, 3, 8, 40]),
        max_seqs=st.sampled_from([1, 2, 5]),
        policy=st.sampled_from(["fcfs", "priority", "cache-aware"]),
        caching=st.booleans(),
        overlap=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3, 6]),
        host_slots=st.sampled_from([None, None, 8]),
        windows=st.sampled_from(GROUPS),
    )
    def begin(
        self,
        blocks,
        block_size,
        budget,
        max_seqs,
        policy,
        caching,
        overlap,
        drafts,
        host_slots,
        windows,
    ):
        fake_model.WINDOWS.append(windows)
        self.engine = make_engine(
            *(blocks, block_size, budget, max_seqs, policy, caching, overlap),
            host_slots=host_slots if caching else None,
            windows=windows,
        )
        if drafts:
            speculate(self.engine, ScriptedDrafter(true_tokens, is_spoilt), drafts)
        self.engine.grammars = compiled(FORMS)
        self.room = self.engine.model.max_model_len
        self.expected = {}
        self.searches = {}
        self.count = 0

    def add(self, prompt, params, **options):
        self.count += 1
        name = str(self.count)
        prompt = prompt[: self.room - 1]
        self.engine.add_request(name, prompt, params, **options)
        if params.is_greedy:
            length = min(params.max_tokens, self.room - len(prompt))
            if params.structured is None:
                self.expected[name] = expected(prompt, length)
            else:
                form = params.structured.as_dict()
                self.expected[name] = written(prompt, length, form, ignore_eos=True)

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 8),
        width=st.sampled_from([1, 2, 3, 6]),
        power=st.sampled_from([0.0, 1.0, 2.0]),
        ending=st.sampled_from([True, False, "never"]),
        priority=st.integers(0, 2),
        background=st.booleans(),
    )
    def search(self, prompt, max_tokens, width, power, ending, priority, background=False):
        self.count += 1
        prompt = prompt[: self.room - 1]
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, length_penalty=power, early_stopping=ending
        )
        priority *= self.engine.scheduler.waiting.policy == "priority"
        how = {"priority": priority, "background": background}
        self.engine.add_request(str(self.count), prompt, params, **how)
        self.searches[str(self.count)] = (prompt, params)

    def check(self, outputs):
        for output in outputs:
            search = self.searches.get(output.request_id)
            if search is not None and output.error is None:
                beams = [(beam.token_ids, pytest.approx(beam.score)) for beam in output.outputs]
                assert beams == plain_beams(*search, logprobs_seen, self.room)
            for sample in output.outputs:
                ended = sample.finish_reason in ("length", "stop")
                if ended and output.request_id in self.expected:
                    assert sample.token_ids == self.expected[output.request_id]

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        greedily=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        form=st.sampled_from([None, None, *FORMS]),
        background=st.booleans(),
    )
    def submit(self, prompt, max_tokens, n, greedily, priority, salt, form=None, background=False):
        more = {"n": n, "structured": form}
        if greedily:
            params = greedy(max_tokens, **more)
        else:
            more["seed"] = self.count
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
        if self.engine.scheduler.waiting.policy != "priority":
            priority = 0
        self.add(prompt, params, priority=priority, cache_salt=salt, background=background)

    @rule(count=st.integers(1, 4))
    def steps(self, count):
        for _ in range(count):
            self.check(step(self.engine))

    @rule(which=st.integers(0, 30))
    def abort(self, which):
        self.engine.abort_request(str(which))

    @rule(
        kind=st.sampled_from([torch.OutOfMemoryError, RuntimeError]),
        times=st.integers(1, 2),
        where=st.sampled_from(["before_copy", "before_launch", "before_draw", "before_result"]),
    )
    def fail(self, kind, times, where):
        left = [times]

        def hook(*_):
            if left[0]:
                left[0] -= 1
                raise kind("injected")

        runner = self.engine.runner
        setattr(runner, where, hook)
        for _ in range(times + 1):
            self.check(step(self.engine))
        setattr(runner, where, lambda *_: None)

    @rule()
    def preempt(self):
        self.engine.scheduler.queues.preempt_youngest()

    @rule()
    def clear(self):
        self.engine.scheduler.cache.clear()

    def teardown(self):
        if hasattr(self, "engine"):
            self.check(run(self.engine).values())
            self.engine.close()
            fake_model.WINDOWS.pop()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=effort(12, 120), stateful_step_count=40, deadline=None)


def test_a_long_random_life(overlap):
    """Nothing leaks, nothing drifts; `make test-long` does a hundred thousand operations."""
    count = effort(1_500, 50_000)
    machine = live(count, overlap, (None,))
    assert machine.engine.runner.parts_copied > count / 50


@pytest.mark.parametrize("windows", [(None, 6, 6), (9, 4)])
def test_a_long_random_life_with_windows(overlap, windows):
    machine = live(effort(500, 1_500), overlap, windows)
    assert machine.engine.runner.parts_copied > 5


def test_a_step_is_taken_back_where_a_token_sees_itself_alone():
    """Its window has passed the block that the step has published."""
    live(1_500, True, (None, 1), drafts=0)


def test_a_long_random_life_with_windows_and_a_lower_tier(overlap):
    machine = live(effort(300, 500), overlap, (None, 3, 9), host_slots=60)
    assert machine.engine.scheduler.tiering.tokens_by_tier["host"] > 0


def forget_device(engine):
    """What no sequence holds, once the tiers have it."""
    assert engine.scheduler.tiering.store.flush(PATIENCE_S)
    engine.scheduler.tiering.poll()
    engine.scheduler.cache.clear()
    engine.runner.after_step()


def live(count, overlap, windows, host_slots=None, drafts=3):
    choose = random.Random(0)
    machine = EngineMachine()
    machine.begin(
        *(20, 4, 16, 5, "fcfs", True, overlap),
        drafts=drafts,
        host_slots=host_slots,
        windows=windows,
    )
    for number in range(count):
        kind = choose.random()
        if host_slots and number % 20 == 0:
            forget_device(machine.engine)
        if kind < 0.12:
            prompt = [choose.randint(1, 2) for _ in range(choose.randint(1, 24))]
            n = choose.choice([1, 1, 2, 3])
            form = choose.choice([None, None, None, *FORMS])
            machine.submit(prompt, choose.randint(1, 12), n, choose.random() < 0.7, 0, "", form)
        elif kind < 0.135:
            prompt = [choose.randint(1, 2) for _ in range(choose.randint(1, 24))]
            width, ending = choose.randint(1, 6), choose.choice([True, False, "never"])
            machine.search(prompt, choose.randint(1, 8), width, 1.0, ending, 0)
        elif kind < 0.165:
            machine.abort(choose.randint(0, machine.count))
        elif kind < 0.185:
            machine.preempt()
        elif kind < 0.195:
            where = choose.choice(["before_copy", "before_launch", "before_draw", "before_result"])
            machine.fail(choose.choice([torch.OutOfMemoryError, RuntimeError]), 1, where)
        else:
            machine.steps(1)
        if choose.random() < 0.001:
            assert machine.engine.scheduler.admission.hits.num_hit_tokens > 0 or machine.count < 50
    machine.teardown()
    return machine
