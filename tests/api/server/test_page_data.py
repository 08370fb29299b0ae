"""What the page asks for: plain answers, its own tenant's only, no failure for odd questions."""

from __future__ import annotations

import pytest
from patience import eventually

SECRET = "The treasure lies under the third stone behind the old mill, said the miller to his son."


def bearer(key):
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_the_page_and_its_files(http):
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    script = http.get("/page/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["x-content-type-options"] == "nosniff"
    for name in ("nothing.js", "..%2Fapp.py", "index.html"):
        assert http.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("blocks/511", 200),
        ("blocks/512", 404),
        ("blocks/-1", 404),
        ("blocks/99999999999999999999", 404),
        ("blocks/0?count=512", 200),
        ("blocks/0?count=513", 404),
        ("blocks/0?count=0", 400),
        ("blocks/x", 400),
        ("journal?since=-1", 400),
        ("journal?limit=0", 400),
        ("journal?limit=1000000", 400),
        ("journal?since=99999999999999999999", 200),
    ],
)
def test_odd_questions(http, path, status):
    assert http.get(f"/page/data/{path}").status_code == status


def test_live(http):
    http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    state = http.get("/page/data/live").json()
    assert state["model"] == "smollm2" and state["sees_all"] is True
    assert state["blocks"]["total"] == 512 and state["tokens"]["generated"] >= 2
    assert all(0 < seconds < 300 for _, seconds in state["first_tokens"])


@pytest.mark.parametrize("path", ["live", "blocks", "blocks/0", "journal"])
def test_data_need_a_key_where_there_are_any(strict, path):
    with strict.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert http.get(f"/page/data/{path}").status_code == 401
        assert http.get(f"/page/data/{path}", **bearer("sk-nobody")).status_code == 401
        assert http.get(f"/page/data/{path}", **bearer("sk-two")).status_code == 200


def held(http, key):
    tiers = http.get("/page/data/blocks", **bearer(key)).json()["tiers"]
    return tiers["device"]["cached"]


def test_the_words_of_others_stay_theirs(strict):
    with strict.http() as http:
        body = {"prompt": SECRET, "max_tokens": 2, "ignore_eos": True}
        assert http.post("/v1/completions", json=body, **bearer("sk-one")).status_code == 200
        told = {}
        for key in ("sk-one", "sk-two"):
            # That there is something, everyone sees.
            eventually(lambda key=key: held(http, key) > 0, "the page shows no cached block")
            texts = [
                http.get(f"/page/data/blocks/{number}", **bearer(key)).json()["text"]
                for number in range(40)
            ]
            journal = http.get("/page/data/journal", **bearer(key)).text
            told[key] = "".join(texts) + journal
        assert "third stone" in told["sk-one"] and "third stone" not in told["sk-two"]


def test_a_tenant_sees_the_times_of_its_own_requests_alone(strict):
    with strict.http() as http:
        body = {"prompt": "How long does it take?", "max_tokens": 2}
        before = {}
        for key in ("sk-one", "sk-two"):
            before[key] = http.get("/page/data/live", **bearer(key)).json()["first_tokens"]
        assert http.post("/v1/completions", json=body, **bearer("sk-one")).status_code == 200
        for key, more in (("sk-one", 1), ("sk-two", 0)):
            now = http.get("/page/data/live", **bearer(key)).json()["first_tokens"]
            assert len(now) == len(before[key]) + more
