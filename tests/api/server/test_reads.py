"""What is read by GET: small routes, compression, the page of the API, templates of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import ServerProcess

from quire.api.server.chat_template_setting import read_chat_template
from quire.errors import ConfigError


@pytest.fixture(scope="module")
def reads(quick):
    with quick.http() as http:
        yield http


def test_what_balancers_ask(reads):
    assert reads.get("/ping").json() == reads.post("/ping").json() == {"status": "ok"}
    assert reads.get("/load").json() == {"server_load": 0, "waiting": 0}
    about = reads.get("/server_info").json()
    assert about["models"] == ["tiny"] and about["tool_format"] == "hermes"
    assert about["version"] == reads.get("/version").json()["version"]


def test_what_is_served_is_told_with_a_key_only(strict):
    with strict.http() as http:
        assert http.get("/ping").status_code == http.get("/load").status_code == 200
        assert http.get("/server_info").status_code == 401
        key = {"Authorization": "Bearer sk-one"}
        assert http.get("/server_info", headers=key).status_code == 200


def test_reads_are_compressed_for_those_who_take_it(reads):
    for path in ("/openapi.json", "/metrics", "/docs"):
        plain = reads.get(path, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        small = reads.get(path, headers={"Accept-Encoding": "gzip"})
        assert small.headers["content-encoding"] == "gzip"
        assert int(small.headers["content-length"]) < len(plain.content) / 2
        head = reads.head(path, headers={"Accept-Encoding": "gzip"})
        assert head.headers["content-encoding"] == "gzip" and head.content == b""
    assert reads.get("/openapi.json").json()["info"]["title"] == "Quire"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_streams_are_not(reads, stream):
    body = {"prompt": "a " * 800, "max_tokens": 2, "echo": True, "stream": stream}
    response = reads.post("/v1/completions", json=body, headers={"Accept-Encoding": "gzip"})
    assert response.status_code == 200 and len(response.content) > 1500
    assert "content-encoding" not in response.headers


def test_the_page_of_the_api_needs_no_other_server(reads):
    page = reads.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    text = page.text
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/server_info"):
        assert f" {path}</code>" in text
    assert "<code>reasoning_effort</code>" in text and "xhigh" in text
    assert "http://" not in text and "https://" not in text and "<script" not in text
    assert "default-src 'none'" in page.headers["content-security-policy"]


TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


def test_a_template_of_ones_own(guarded: ServerProcess):
    """The server has that of `conftest.py`, which is this one."""
    with guarded.http() as http:
        asked = {"messages": [{"role": "user", "content": "Hi."}]}
        ids = http.post("/tokenize", json=asked).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == "[user] Hi."


def test_a_template_is_a_file_or_a_text(tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    assert read_chat_template(str(path)) == read_chat_template(TEMPLATE) == TEMPLATE


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("/nowhere/template.jinja", "cannot be read"),
        ("{% for %}", "is broken"),
        ("{{ a }}" * 200_000, "characters"),
    ],
)
def test_templates_that_cannot_be_used(setting, says):
    with pytest.raises(ConfigError, match=says):
        read_chat_template(setting)
