"""Who gets a slot, and when, while more adapters are asked for than there are slots.

Callers ask again as soon as they are answered, so there is always more to do than fits. All folders
are read beforehand: what happens depends on steps alone.
"""

import random
import time
from collections import Counter
from statistics import mean

from adapted_runner import AdaptedRunner, lora
from fake_model import greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.engine.schedule.no_tiers import NoTiers, TierLookup

LONGEST = 12  # tokens of an answer
LATE = 4  # steps between a request and its first, or an answer and the next begin, at most


class Callers:
    """Each asks for one adapter out of a list, again and again."""

    def __init__(self, lists, slots, max_seqs, host=None):
        self.lists = lists
        names = {name for each in lists for name in each}
        self.engine = make_engine(
            *(1024, 4, 1024, max_seqs),
            runner_class=AdaptedRunner,
            windows=(None,),
            adapter_slots=slots,
            host_adapters=host or len(names),
        )
        self.engine.runner.folders = {lora(name).lora_path: i for i, name in enumerate(names, 1)}
        for name in names:
            self.engine.adapters.find(lora(name)).wait(60)
        self.dice = random.Random(0)
        self.asked = {}  # by caller, in which step
        self.longest = {}  # by caller, how long an answer took

    def run(self, steps):
        """Returns how many sequences each step computed."""
        rows = []
        for caller in range(len(self.lists)):
            self._ask(caller, 0)
        for number in range(steps):
            for output in step(self.engine):
                caller = int(output.request_id)
                self._note(caller, number)
                self._ask(caller, number)
            rows.append(len(self.engine.runner.plans[-1].counts))
        for caller in self.asked:
            self._note(caller, steps)
        return rows

    def _ask(self, caller, number):
        name, length = self.dice.choice(self.lists[caller]), self.dice.randint(2, LONGEST)
        self.engine.add_request(str(caller), [1, 2, 3], greedy(length), lora_request=lora(name))
        self.asked[caller] = number

    def _note(self, caller, number):
        took = number - self.asked[caller]
        self.longest[caller] = max(took, self.longest.get(caller, 0))


def test_nobody_starves():
    """64 adapters over 8 slots, of which the first 8 are asked for at every moment.

    Before it begins, a request waits for those of at most 63 other adapters, of which 8 run at a
    time, each until the last of the requests that it began with has its answer.
    """
    busy = [[f"n{i}"] for i in range(8) for _ in range(4)]
    others = [[f"n{i}"] for i in range(8, 64)]
    callers = Callers(busy + others, slots=8, max_seqs=64)
    callers.run(300)
    assert max(callers.longest.values()) <= 64 // 8 * (LONGEST + LATE) + LONGEST
    assert len(callers.longest) == len(busy) + len(others)


def test_an_adapter_that_has_to_be_read_again_has_its_turn():
    """Host memory has room for the one in the slot alone, whose callers never pause for long."""
    callers = Callers([["a"], ["a"], ["d"]], slots=1, max_seqs=4, host=1)
    answered, deadline = Counter(), time.monotonic() + PATIENCE_S
    for caller in range(3):
        callers._ask(caller, 0)
    while min(answered[caller] for caller in range(3)) < 4 and time.monotonic() < deadline:
        for output in step(callers.engine):
            answered[int(output.request_id)] += 1
            callers._ask(int(output.request_id), 0)
    assert min(answered[caller] for caller in range(3)) == 4


def test_one_that_is_tried_first_and_came_later_holds_nobody_up():
    """Its prompt is cached, its adapter in a folder: host memory keeps that of the first."""
    engine = make_engine(
        *(64, 4, 64, 1, "cache-aware"),
        runner_class=AdaptedRunner,
        windows=(None,),
        adapter_slots=1,
        host_adapters=1,
    )
    engine.runner.folders = {lora("a").lora_path: 1, lora("b").lora_path: 2}
    long_prompt = list(range(1, 13))
    for names in ["b"], ["a"], ["a", "b"]:
        for name in names:
            prompt = long_prompt if name == "b" else [7, 8]
            engine.add_request(name, prompt, greedy(3), lora_request=lora(name))
        run(engine)


def test_one_adapter_too_many_costs_next_to_nothing():
    """Only one slot is emptied for it; all others go on, and the batch is full."""
    anything = [f"n{i}" for i in range(9)]
    callers = Callers([anything] * 60, slots=8, max_seqs=32)
    assert mean(callers.run(150)) > 0.95 * 32
    mean_answer = (2 + LONGEST) / 2
    assert callers.engine.adapters.slots.num_loads <= 8 + 150 / mean_answer


def test_an_adapter_begins_all_that_it_had_when_it_got_its_slot():
    """However many steps that takes; what comes later waits behind those that wait."""
    callers = Callers([["a"], ["b"]], slots=1, max_seqs=64)
    engine = callers.engine
    engine.scheduler.budget = 9  # three prompts in a step
    for name in "abaaaaaaaa":
        ask(engine, f"{name} {engine.num_waiting}", name)
    step(engine)
    ask(engine, "a later", "a")
    order = finished_order(engine)
    assert order[-2:] == ["b 1", "a later"]
    assert engine.adapters.slots.num_loads == 3


def test_no_adapter_passes_with_more_than_a_batch():
    callers = Callers([["a"], ["b"]], slots=1, max_seqs=4)
    engine = callers.engine
    for number in range(20):
        ask(engine, f"a {number}", "a")
        if number == 0:
            ask(engine, "b", "b")
    assert finished_order(engine).index("b") == 4


def test_a_sequence_keeps_its_slot_while_a_far_tier_is_asked_for_its_prefix():
    class AskedFirst(NoTiers):
        answers = iter([TierLookup.ASKED])

        def begin(self, *_):
            return next(self.answers, TierLookup.NOTHING)

    engine = Callers([["a"], ["b"]], slots=1, max_seqs=4).engine
    engine.scheduler.admission.tiering = AskedFirst()
    ask(engine, "a", "a")
    ask(engine, "b", "b")
    assert finished_order(engine) == ["a", "b"]
    assert engine.adapters.slots.num_loads == 2


def ask(engine, request, name):
    engine.add_request(request, [1, 2, 3], greedy(4), lora_request=lora(name))


def finished_order(engine):
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in step(engine)]
    return order
