"""Penalties with speculation crash the engine (CVE-2026-44223)."""

from __future__ import annotations

from itertools import product

LOOP = [100, 200, 300, 400] * 12  # what n-grams guess from
PENALTIES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"frequency_penalty": 2.0, "logit_bias": {"100": 100, "200": 90}},
    {"repetition_penalty": 0.01, "presence_penalty": -2.0, "min_tokens": 8},
]
DRAWS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "n": 3, "seed": 1},
]


def test_the_engine_lives_and_the_answers_are_those_without(tiny_server, keyed_server):
    """One server guesses ahead, the other does not."""
    engine = tiny_server.engine_pid
    with (
        tiny_server.http() as guessing,
        keyed_server.http(headers={"Authorization": "Bearer sk-one"}) as plain,
    ):
        for penalties, draw in product(PENALTIES, DRAWS):
            body = {"prompt": LOOP, "max_tokens": 24, "ignore_eos": True, **penalties, **draw}
            answers = [http.post("/v1/completions", json=body) for http in (guessing, plain)]
            assert [answer.status_code for answer in answers] == [200, 200]
            texts = [[choice["text"] for choice in each.json()["choices"]] for each in answers]
            assert texts[0] == texts[1], body
        lines = guessing.get("/metrics").text.splitlines()
        drafted = [line for line in lines if line.startswith("quire_drafted_tokens_total")]
        assert sum(float(line.split()[-1]) for line in drafted) > 0
    assert tiny_server.engine_pid == engine
