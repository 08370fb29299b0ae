"""One id joins an answer, its log line, its story on the page and what a proxy has noted."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S
from raw_http import head, send

ASKED = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "ignore_eos": True}


def logged(server, answer_id: str, count: int = 1) -> list[dict]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        lines = [json.loads(li) for li in server.log.splitlines() if li.startswith('{"request":')]
        if len(found := [line for line in lines if line["request"] == answer_id]) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(server.log)


def story_of(http, number: int) -> dict:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # the page's data are some tenths of a second old
        stories = http.get("/page/data/journal").json()["requests"]
        if found := [each for each in stories if each["id"] == str(number)]:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(stories)


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/v1/completions", ASKED, "cmpl"), ("/v1/chat/completions", TALK, "chatcmpl")],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [None, "trace-7f:3/a.b@c~d+e="])
def test_the_answer_the_header_the_log_and_the_journal_agree(
    quick, path, body, prefix, stream, given
):
    headers = {} if given is None else {"X-Request-Id": given}
    with quick.http() as http:
        response = http.post(path, json={**body, "stream": stream}, headers=headers)
        sent = response.headers["x-request-id"]
        text = response.text.split("\n")[0].removeprefix("data: ") if stream else response.text
        answer_id = json.loads(text)["id"]
        assert answer_id == f"{prefix}-{sent}"
        assert sent == given if given else re.fullmatch("[0-9a-f]{32}", sent)
        line = logged(quick, answer_id)[-1]
        assert line["output_tokens"] == 2
        assert story_of(http, line["number"])["name"] == answer_id


def test_every_prompt_of_a_request_has_its_line(quick):
    with quick.http() as http:
        answer = http.post(
            "/v1/completions", json={**ASKED, "prompt": ["a", "b b", "c c c"]}
        ).json()
    lines = logged(quick, answer["id"], 3)
    assert len({line["number"] for line in lines}) == 3


@pytest.mark.parametrize(
    "request_bytes",
    [
        head("GET /nothing HTTP/1.1", "X-Request-Id: mine"),
        head("GET /v1/completions HTTP/1.1", "X-Request-Id: mine"),
        head("GET /health HTTP/1.1", "X-Request-Id: mine", host="evil.example"),
        head("GET /metrics HTTP/1.1", "X-Request-Id: mine"),
        head("POST /tokenize HTTP/1.1", "X-Request-Id: mine", "Content-Length: 99999999"),
        head("POST /tokenize HTTP/1.1", "X-Request-Id: mine", "Content-Length: 0"),
        head("GET /page/data/blocks/x HTTP/1.1", "X-Request-Id: mine"),
    ],
)
def test_every_response_has_the_id(quick, request_bytes):
    with_close = request_bytes.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    assert send(quick.url, with_close)[1]["x-request-id"] == "mine"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "<script>", "\xe9", "a\tb"])
def test_an_id_that_logs_would_have_to_escape_is_replaced(quick, given):
    headers = send(quick.url, head("GET /health HTTP/1.1", f"X-Request-Id: {given}"))[1]
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


def test_the_same_id_many_times_at_once(quick):
    """Each has its own answer: ids are names for people, not keys of the engine's."""

    def ask(number: int) -> tuple[str, int]:
        body = {"prompt": [number] * 20, "max_tokens": number, "ignore_eos": True}
        with quick.http(headers={"X-Request-Id": "all-the-same"}) as http:
            answer = http.post("/v1/completions", json=body).json()
        return answer["id"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(1, 17)))
    assert answers == [("cmpl-all-the-same", number) for number in range(1, 17)]
    assert len({line["number"] for line in logged(quick, "cmpl-all-the-same", 16)}) == 16


def test_an_id_shows_no_other_tenants_story(strict):
    for key in ("sk-one", "sk-two"):
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "shared"}
        with strict.http(headers=headers) as http:
            assert http.post("/v1/completions", json=ASKED).status_code == 200
            stories = http.get("/page/data/journal").json()["requests"]
        assert [each["name"] for each in stories].count("cmpl-shared") == 1
