import pytest
import torch
from fake_model import check_idle, expected, greedy, make_engine, run, step

PROMPTS = {str(i): [i + 1] * (2 + 3 * i) for i in range(6)}


def submit(engine, max_tokens=12):
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(max_tokens))


def fail_at(engine, steps, error):
    """Raise `error` at the given launches, counted from the first."""
    count = 0

    def hook(plan):
        nonlocal count
        count += 1
        if count in steps:
            raise error

    engine.runner.before_launch = hook


def all_right(outputs, max_tokens=12):
    for name, prompt in PROMPTS.items():
        assert outputs[name].outputs[0].token_ids == expected(prompt, max_tokens)
        assert outputs[name].error is None


@pytest.mark.diagonal
@pytest.mark.parametrize("k", range(1, 16))
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("a kernel")])
def test_one_failed_step_changes_no_answer(k, error):
    engine = make_engine(num_blocks=64)
    submit(engine)
    fail_at(engine, {k}, error)
    all_right(run(engine))


@pytest.mark.diagonal
@pytest.mark.parametrize("k", range(1, 12))
@pytest.mark.parametrize("blocks", [12, 64])
def test_memory_that_stays_short_for_a_while(k, blocks):
    engine = make_engine(num_blocks=blocks)
    submit(engine)
    fail_at(engine, set(range(k, k + 5)), torch.OutOfMemoryError("no room"))
    budgets = []
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in step(engine)}
        budgets.append(engine.scheduler.budget)
    all_right(outputs)
    assert min(budgets) < engine.scheduler.max_budget
    check_idle(engine)
    engine.add_request("later", [3], greedy(55 if blocks == 64 else 40))
    engine.add_request("later still", [4], greedy(55 if blocks == 64 else 40))
    run(engine)
    engine.add_request("last", [5], greedy(40))
    run(engine)
    assert engine.scheduler.budget == engine.scheduler.max_budget


def test_only_small_steps_fit():
    engine = make_engine(num_blocks=64)
    submit(engine)

    def hook(plan):
        if plan.num_tokens > 3:
            raise torch.OutOfMemoryError("no room")

    engine.runner.before_launch = hook
    all_right(run(engine))


def test_no_memory_at_all_ends_in_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr("quire.engine.recovery.FIRST_WAIT_S", 0.0)
    engine = make_engine(num_blocks=64)
    submit(engine, max_tokens=2)
    fail_at(engine, range(10**9), torch.OutOfMemoryError("no room"))
    outputs = run(engine)
    assert {o.outputs[0].finish_reason for o in outputs.values()} == {"error"}
    assert all("out of memory even for one token" in o.error for o in outputs.values())


@pytest.mark.parametrize("bad", list(PROMPTS))
@pytest.mark.parametrize("when", [0, 3])
def test_a_request_that_breaks_every_batch_is_found_and_the_others_go_on(bad, when, caplog):
    engine = make_engine(num_blocks=64)
    submit(engine)
    marker = PROMPTS[bad][0]

    def hook(plan):
        for row in range(len(plan.counts)):
            context = engine.runner.context(plan, row)
            if context[0] == marker and len(context) >= len(PROMPTS[bad]) + when:
                raise ValueError("I break batches")

    engine.runner.before_launch = hook
    outputs = run(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    says = "The step of this request failed (ValueError); its log has the reason."
    assert outputs[bad].error == says
    assert caplog.text.count("ValueError: I break batches") == 1
    for name, prompt in PROMPTS.items():
        if name != bad:
            assert outputs[name].outputs[0].token_ids == expected(prompt, 12)


def test_a_broken_request_among_those_that_share_its_prefix():
    engine = make_engine(num_blocks=64, budget=200)
    prefix = list(range(1, 21))
    for i in range(5):
        engine.add_request(str(i), [*prefix, 40 + i], greedy(6))

    def hook(plan):
        if any(44 in engine.runner.context(plan, row)[:21] for row in range(len(plan.counts))):
            raise ValueError("bad")

    engine.runner.before_launch = hook
    outputs = run(engine)
    assert [outputs[str(i)].error is None for i in range(5)] == [True] * 4 + [False]
    for i in range(4):
        assert outputs[str(i)].outputs[0].token_ids == expected([*prefix, 40 + i], 6)


@pytest.mark.parametrize("k", range(1, 6))
def test_a_failed_copy_is_made_again(k):
    from quire.params import SamplingParams

    def play(fail):
        engine = make_engine(num_blocks=64)
        params = SamplingParams(n=4, max_tokens=9, seed=1, ignore_eos=True)
        engine.add_request("a", list(range(1, 7)), params)
        count = 0

        def hook(copies):
            nonlocal count
            count += 1
            if fail and count == k:
                raise RuntimeError("copy")

        engine.runner.before_copy = hook
        return [o.token_ids for o in run(engine)["a"].outputs]

    assert play(True) == play(False)


def test_an_interrupt_leaves_nothing_half_done():
    engine = make_engine(num_blocks=64)
    submit(engine)
    step(engine)
    fail_at(engine, {1}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    all_right(run(engine))


def test_rows_without_usable_logits_end_their_own_request_only():
    from quire.runner.sampling.sampler import BadLogits

    engine = make_engine(num_blocks=64)
    submit(engine)

    def hook(plan):
        for row in range(len(plan.counts)):
            if engine.runner.context(plan, row)[0] == PROMPTS["3"][0] and len(plan.samples) > row:
                raise BadLogits([row])

    engine.runner.before_launch = hook
    outputs = run(engine)
    assert outputs["3"].error.startswith("The model gave no usable logits")
    for name, prompt in PROMPTS.items():
        if name != "3":
            assert outputs[name].outputs[0].token_ids == expected(prompt, 12)


def test_a_stream_that_grows_and_breaks_at_once_ends_once():
    """Overlapped: the step that draws its token ends together with the one that cannot begin."""
    from quire.runner.sampling.sampler import BadLogits

    engine = make_engine(num_blocks=64, overlap=True)
    engine.add_request("stream", [1, 2, 3], greedy(8), stream=True)

    def hook(plan):
        if engine.runner.steps == 4:
            raise BadLogits([0])

    engine.runner.before_launch = hook
    told = []
    while engine.has_unfinished_requests():
        told += step(engine)
    assert [output.finished for output in told].count(True) == 1
    assert told[-1].error.startswith("The model gave no usable logits")
    check_idle(engine)


@pytest.mark.parametrize("where", ["prefixes.publish", "preemption.make_room", "admission.admit"])
@pytest.mark.parametrize("k", [1, 2, 5, 9, 14])
def test_an_interrupt_while_planning_leaves_nothing_wrong(monkeypatch, where, k):
    """Blocks were published whose KV was never computed: no match may find them."""
    engine = make_engine(num_blocks=64)
    submit(engine)
    part, name = where.split(".")
    owner = getattr(engine.scheduler, part)
    whole, calls = getattr(owner, name), []

    def interrupted(*args):
        result = whole(*args)
        calls.append(1)
        if len(calls) == k:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    outputs = {}
    for _ in range(200):
        if not engine.has_unfinished_requests():
            break
        try:
            outputs |= {o.request_id: o for o in step(engine)}
        except KeyboardInterrupt:
            engine.runner.after_step()
    all_right(outputs)
    check_idle(engine)


def test_an_interrupt_while_committing_leaves_nothing_wrong(monkeypatch):
    engine = make_engine(num_blocks=64)
    submit(engine)
    whole, calls = engine.commit.append, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) in (2, 9, 30):
            raise KeyboardInterrupt
        whole(*args)

    monkeypatch.setattr(engine.commit, "append", interrupted)
    outputs = {}
    while engine.has_unfinished_requests():
        try:
            outputs |= {o.request_id: o for o in step(engine)}
        except KeyboardInterrupt:
            engine.runner.after_step()
    all_right(outputs)
