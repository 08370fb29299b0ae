"""Prompts that are scored, whatever happens to them meanwhile."""

from __future__ import annotations

import pytest
from drawing_runner import DrawingRunner
from fake_model import check_idle, greedy, logprobs_behind, make_engine, step

from quire.params import SamplingParams

PROMPT = [(7 * i) % 49 + 1 for i in range(22)]
SCORES = [logprobs_behind(PROMPT[:at])[PROMPT[at]] for at in range(1, len(PROMPT))]


def scored(params, overlap, preempt_before=None):
    """The output of a request that gives its blocks back before that step; another goes on."""
    engine = make_engine(budget=6, overlap=overlap, runner_class=DrawingRunner)
    engine.add_request("other", [1, 2, 3], greedy(20))
    step(engine)
    engine.add_request("scored", PROMPT, params)
    outputs = {}
    while engine.has_unfinished_requests():
        if engine.commit.num_steps + len(engine._under_way) == preempt_before:
            assert engine.scheduler.queues.preempt_youngest()
            preempt_before = None
        outputs |= {output.request_id: output for output in step(engine)}
    check_idle(engine)
    assert preempt_before is None
    return outputs["scored"]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("preempt_before", range(2, 7))
def test_each_token_of_the_prompt_is_scored_once(overlap, preempt_before):
    """Also where the step that scores some is under way while the sequence is preempted."""
    params = SamplingParams(prompt_logprobs=0, max_tokens=3, temperature=0)
    first, *others = scored(params, overlap, preempt_before).prompt_logprobs
    assert first is None
    assert [list(entry) for entry in others] == [[token] for token in PROMPT[1:]]
    assert [next(iter(e.values())).logprob for e in others] == pytest.approx(SCORES, abs=1e-4)


@pytest.mark.parametrize(("asked", "count"), [({"n": 3}, 3), ({"n": 2, "best_of": 4}, 2)])
def test_without_an_answer_there_are_as_many_samples_as_were_asked_for(asked, count):
    output = scored(SamplingParams(prompt_logprobs=0, max_tokens=0, **asked), overlap=False)
    assert [sample.index for sample in output.outputs] == list(range(count))
    for sample in output.outputs:
        assert (sample.token_ids, sample.text, sample.finish_reason) == ([], "", "length")
    assert len(output.prompt_logprobs) == len(PROMPT)
