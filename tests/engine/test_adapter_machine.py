"""Requests with and without adapters at random: the right tokens, and no block of another's."""

import random

import torch
from adapted_runner import AdaptedRunner, expected_with, lora
from effort import effort
from fake_model import greedy, make_engine, run, step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.beam_params import BeamSearchParams

CONTENTS = {"a": 1, "b": 2, "same as a": 1, "c": 3, "d": 4}
NAMES = [None, None, *CONTENTS]


class AdapterMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from([8, 12, 24]),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 3, 40]),
        max_seqs=st.sampled_from([1, 3, 6]),
        policy=st.sampled_from(["fcfs", "cache-aware"]),
        overlap=st.booleans(),
        host_slots=st.sampled_from([None, 8]),
        slots=st.sampled_from([1, 2, 5]),
        host_adapters=st.sampled_from([0, 1, 8]),
        least_gain=st.sampled_from([1, 100]),
    )
    def begin(
        self,
        blocks,
        block_size,
        budget,
        max_seqs,
        policy,
        overlap,
        host_slots,
        slots,
        host_adapters,
        least_gain,
    ):
        self.engine = make_engine(
            *(blocks, block_size, budget, max_seqs, policy, True, overlap),
            host_slots=host_slots,
            runner_class=AdaptedRunner,
            windows=(None,),
            adapter_slots=slots,
            host_adapters=slots + host_adapters,
        )
        exchange = self.engine.scheduler.exchange
        exchange.quiet_steps, exchange.steps_between, exchange.least_gain = 0, 1, least_gain
        self.runner = self.engine.runner
        self.runner.folders = {lora(name).lora_path: each for name, each in CONTENTS.items()}
        self.most_in_host = slots + host_adapters
        self.numbers = dict.fromkeys(CONTENTS, 1)
        self.room = self.engine.model.max_model_len
        self.expected = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=16),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 2]),
        salt=st.sampled_from(["", "", "x", "f1", "xf1"]),
        name=st.sampled_from(NAMES),
    )
    def submit(self, prompt, max_tokens, n, salt, name):
        prompt = prompt[: self.room - 1]
        asked = lora(name, self.numbers[name]) if name else None
        self._add(prompt, greedy(max_tokens, n=n), cache_salt=salt, lora_request=asked)
        length = min(max_tokens, self.room - len(prompt))
        self.expected[str(self.count)] = expected_with(CONTENTS.get(name, 0), prompt, length)

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        width=st.sampled_from([2, 3]),
        name=st.sampled_from(NAMES),
    )
    def search(self, prompt, width, name):
        """That beams wait for each other must not keep slots for ever."""
        asked = lora(name, self.numbers[name]) if name else None
        params = BeamSearchParams(beam_width=width, max_tokens=4)
        self._add(prompt[: self.room - 1], params, lora_request=asked)

    def _add(self, prompt, params, **options):
        self.count += 1
        self.engine.add_request(str(self.count), prompt, params, **options)

    @rule(count=st.integers(1, 4))
    def steps(self, count):
        for _ in range(count):
            self.check(step(self.engine))

    def check(self, outputs):
        self.runner.check_blocks()
        assert self.runner.most_in_host <= self.most_in_host + len(CONTENTS)
        for output in outputs:
            # Failures may meet a request twice in a row, where steps between did nothing.
            assert output.error is None or output.error.startswith("The step of this request")
            expected = self.expected.get(output.request_id)
            for sample in output.outputs:
                if expected is not None and sample.finish_reason == "length":
                    assert sample.token_ids == expected

    @rule(which=st.integers(0, 30))
    def abort(self, which):
        self.engine.abort_request(str(which))

    @rule(name=st.sampled_from([*CONTENTS]))
    def unload(self, name):
        """What runs goes on; the next request has another number, and reads the folder again."""
        self.engine.adapters.forget(lora(name, self.numbers[name]))
        self.numbers[name] += 1

    @rule(
        kind=st.sampled_from([torch.OutOfMemoryError, RuntimeError]),
        where=st.sampled_from(["before_copy", "before_load", "before_launch", "before_result"]),
    )
    def fail(self, kind, where):
        left = [1]

        def hook(*_):
            if left[0]:
                left[0] -= 1
                raise kind("injected")

        setattr(self.runner, where, hook)
        for _ in range(2):
            self.check(step(self.engine))
        setattr(self.runner, where, lambda *_: None)

    @rule()
    def interrupt(self):
        self.engine.begin_again()

    @rule()
    def preempt(self):
        self.engine.scheduler.queues.preempt_youngest()

    @rule()
    def clear(self):
        self.engine.scheduler.cache.clear()

    def teardown(self):
        if hasattr(self, "engine"):
            self.check(run(self.engine).values())
            catalog = self.engine.adapters
            assert len(self.runner.in_host) <= self.most_in_host
            assert not any(adapter.requests for adapter in catalog._in_host.values())
            for name, number in self.numbers.items():
                catalog.forget(lora(name, number))
            self.engine.close()


TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(
    max_examples=effort(15, 120), stateful_step_count=40, deadline=None
)


def test_a_long_random_life(overlap):
    """More adapters than slots, and than host memory keeps."""
    choose = random.Random(1)
    machine = AdapterMachine()
    machine.begin(24, 4, 16, 5, "fcfs", overlap, None, 2, 1, 1)
    for _ in range(effort(2_000, 20_000)):
        kind = choose.random()
        if kind < 0.15:
            prompt = [choose.randint(1, 2) for _ in range(choose.randint(1, 24))]
            name = choose.choice(NAMES)
            machine.submit(prompt, choose.randint(1, 12), choose.choice([1, 1, 2]), "", name)
        elif kind < 0.17:
            machine.search([1, 2, choose.randint(1, 2)], 3, choose.choice(NAMES))
        elif kind < 0.19:
            machine.abort(choose.randint(0, machine.count))
        elif kind < 0.21:
            machine.unload(choose.choice([*CONTENTS]))
        elif kind < 0.22:
            machine.preempt()
        elif kind < 0.23:
            where = choose.choice(["before_load", "before_launch", "before_result"])
            machine.fail(choose.choice([torch.OutOfMemoryError, RuntimeError]), where)
        else:
            machine.steps(1)
    machine.teardown()
    stats = machine.engine.adapters.stats()
    assert stats["loads"] > 20 and stats["evictions"] > 20
