"""Streams of server-sent events, in any pieces, from servers of all manners."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.serve import answer
from quire.bench.serve.answer import Answer, Outcome, message_of

USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def event(data, newline="\n"):
    return f"data: {json.dumps(data)}{2 * newline}".encode()


def choice(text, ended=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": ended}]}


def delta(content, ended=None):
    return {"choices": [{"index": 0, "delta": content, "finish_reason": ended}]}


COMPLETION = [choice(" a"), choice(""), choice(" b", "length"), {"choices": [], "usage": USAGE}]
CHAT = [
    delta({"role": "assistant", "content": ""}),
    delta({"reasoning_content": "so"}),
    delta({"content": 'say "finish_reason":null'}),
    delta({"content": "b"}),
    delta({}, "stop"),
    {"choices": [], "usage": USAGE},
]


def read(*pieces):
    """Each piece comes a second after the one before."""
    found = Answer(Outcome(at=0.0, num_asked=3))
    for now, piece in enumerate(pieces, start=1):
        found.feed(piece, float(now))
    found.close()
    return found.outcome


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("events", [COMPLETION, CHAT])
def test_tokens_are_timed_and_the_end_is_seen(events, newline):
    outcome = read(*(event(each, newline) for each in events), f"data: [DONE]{newline}".encode())
    assert outcome.error is None
    first = 2 if events is CHAT else 1  # the role is no token
    assert (outcome.first, list(outcome.gaps), outcome.last) == (first, [1.0, 1.0], first + 2)
    assert (outcome.num_in, outcome.num_out, outcome.num_cached) == (30, 3, 16)


@given(st.sampled_from([COMPLETION, CHAT]), st.sampled_from(["\n", "\r\n"]), st.data())
def test_however_the_bytes_are_cut(events, newline, data):
    stream = b": a comment" + 2 * newline.encode()
    stream += b"".join(event(each, newline) for each in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    outcome = read(*pieces)
    assert outcome.error is None and outcome.num_out == 3 and len(outcome.gaps) == 2
    assert sum(outcome.gaps) == outcome.last - outcome.first


def test_tokens_of_one_piece_came_together():
    stream = event(choice(" a")) + event(choice(" b")) + event(choice(" c", "stop"))
    outcome = read(b"", stream)
    assert (outcome.first, list(outcome.gaps), outcome.error) == (2.0, [0.0, 0.0], None)


def test_an_event_of_several_lines():
    outcome = read(
        b'event: token\ndata: {"choices":\ndata: [{"text": "a"}]}\n\n' + event(COMPLETION[2])
    )
    assert (outcome.first, outcome.error) == (1.0, None)


@pytest.mark.parametrize(
    ("stream", "kind", "message"),
    [
        (event(choice(" a")), "cut short", "without a finish_reason"),
        (b"", "cut short", "without a finish_reason"),
        (event({"error": {"message": "Too hot."}}), "error in the stream", "Too hot."),
        (event(choice(" a", "error")), "error in the stream", "finish_reason"),
        (b"data: {oops\n\n", "odd event", "oops"),
        (b"data: [1, 2]\n\n", "odd event", "1, 2"),
        (b'data: {"choices": [7]}\n\n', "odd event", "7"),
        (b'data: {"choices": [], "usage": "many"}\n\n', "odd event", "many"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "odd event", "[[["),
    ],
)
def test_what_goes_wrong_has_a_kind(stream, kind, message):
    outcome = read(stream)
    assert outcome.error == kind and message in outcome.message


def test_a_stream_without_events_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(answer, "LONGEST_EVENT", 100)
    outcome = read(b"x" * 80, b"x" * 80)
    assert outcome.error == "odd event"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ({"error": {"message": "No."}}, "No."),
        ({"message": "No."}, "No."),
        ({"detail": [{"msg": "No."}]}, "[{'msg': 'No.'}]"),
        ({"code": 5}, "{'code': 5}"),
        ("No.", "No."),
    ],
)
def test_the_sentence_in_an_error(error, sentence):
    assert message_of(error) == sentence
