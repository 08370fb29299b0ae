"""What outcomes say together, on outcomes made by hand."""

from __future__ import annotations

from array import array

import pytest

from quire.bench.serve.answer import Outcome
from quire.bench.serve.figures import Objective, notes, summarize
from quire.bench.serve.load import Result

NOTHING = Objective()


def answered(at, first, gaps, cached=0):
    """One token after the first for each gap."""
    last = first + sum(gaps)
    return Outcome(
        at=at,
        num_asked=len(gaps) + 1,
        first=first,
        last=last,
        total=last,
        gaps=array("d", gaps),
        num_in=100,
        num_out=len(gaps) + 1,
        num_cached=cached,
    )


def failed(kind, at=0.0):
    return Outcome(at=at, num_asked=5, error=kind, message=f"{kind}, it says.", total=0.5)


def result(*outcomes, cpu=(1.0,)):
    return Result(list(outcomes), list(cpu), interrupted=False)


def test_latencies_in_ms():
    found = summarize(result(answered(0, 0.1, [0.01] * 10), answered(1, 0.3, [0.03] * 10)), NOTHING)
    rows = {row["ms"]: row for row in found["rows"]}
    assert list(rows) == ["first token", "between tokens", "mean per token", "end to end"]
    assert rows["first token"]["p50"] == pytest.approx(200)
    assert rows["first token"]["p99"] == pytest.approx(298)
    assert rows["between tokens"]["mean"] == pytest.approx(20)
    assert rows["mean per token"]["max"] == pytest.approx(30)
    assert rows["end to end"]["p90"] == pytest.approx(200 + 0.9 * 400)


def test_throughput_is_from_the_first_request_to_the_last_answer():
    found = summarize(result(answered(2, 1, [0.5, 0.5], cached=25), answered(3, 3, [])), NOTHING)
    assert found["seconds"] == pytest.approx(4)
    assert found["throughput"] == {
        "requests/s": pytest.approx(0.5),
        "input tok/s": pytest.approx(50),
        "output tok/s": pytest.approx(1),
    }
    assert found["tokens"] == {"in": 200, "cached": 25, "out": 4} and found["goodput"] is None
    assert "12.5 % of prompt tokens were cached" in notes(found, NOTHING)


def test_failures_are_counted_by_kind_and_are_in_no_latency():
    outcomes = [answered(0, 1, [1]), failed("timeout"), failed("HTTP 503"), failed("timeout")]
    found = summarize(result(*outcomes), Objective(ttft=5000))
    requests = found["requests"]
    assert (requests["sent"], requests["answered"], requests["failed"]) == (4, 1, 3)
    assert requests["errors"] == {"timeout": 2, "HTTP 503": 1}
    assert found["rows"][0]["max"] == 1000 and found["goodput"]["share"] == 0.25
    assert "failed: 2 × timeout: timeout, it says." in notes(found, NOTHING)


def test_nothing_was_answered():
    found = summarize(result(failed("no connection")), Objective(itl=5))
    assert found["rows"] == [] and found["goodput"]["requests/s"] == 0
    assert found["throughput"]["output tok/s"] == 0


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(ttft=150), 2),
        (Objective(itl=25), 2),
        (Objective(ttft=150, itl=25), 1),
        (Objective(ttft=10), 0),
        (Objective(ttft=1000, itl=1000), 3),
    ],
)
def test_goodput_needs_every_part_of_the_objective(objective, good):
    """The mean over a request decides: one slow token among quick ones is forgiven."""
    quick = answered(0, 0.1, [0.01] * 9 + [0.1])
    slow_start, slow_tokens = answered(0, 0.4, [0.01] * 10), answered(0, 0.1, [0.03] * 10)
    found = summarize(result(quick, slow_start, slow_tokens), objective)
    assert found["goodput"]["share"] == pytest.approx(good / 3)


def test_where_the_server_counts_nothing_chunks_are_tokens():
    outcome = answered(0, 1, [1, 1])
    outcome.num_out = 0
    assert summarize(result(outcome), NOTHING)["tokens"]["out"] == 3


def test_answers_shorter_than_asked_are_said():
    outcome = answered(0, 1, [1, 1])
    outcome.num_asked = 10
    found = summarize(result(outcome), NOTHING)
    assert found["requests"]["short"] == 1
    assert any("shorter than asked" in line for line in notes(found, NOTHING))


def test_a_client_at_its_limit_is_said():
    found = summarize(result(answered(0, 0.5, [0.5]), cpu=(0.9, 0.2)), NOTHING)
    assert found["client"]["cores"] == pytest.approx(1.1)
    assert "more --processes" in notes(found, NOTHING)[-1]
    found = summarize(result(answered(0, 0.5, [0.5]), cpu=(0.2, 0.2)), NOTHING)
    assert "more --processes" not in notes(found, NOTHING)[-1]
