"""Two replicas behind one address, with a Redis that they share; parts of them are killed.

All tests are on one server, and each leaves it as it was.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter

import httpx
import openai
import pytest
from browser import opened, running_browser
from patience import PATIENCE_S, eventually
from redis_server import RedisServer
from server_process import ServerProcess

pytestmark = pytest.mark.long

COUNT = 2
TALK = "{} is the number of this talk, and it goes on for quite a while, "


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.kill()


@pytest.fixture(scope="module")
def server(tiny, redis):
    before = set(os.listdir("/dev/shm"))
    flags = ["--replicas", str(COUNT), "--remote-cache-url", redis.url, "--drain-seconds", "20"]
    server = ServerProcess.tiny(tiny, *flags)
    yield server
    pids = [server.server_pid, *server.replica_pids]
    assert server.stop() == 0, server.log
    assert not any(map(is_running, pids))
    assert set(os.listdir("/dev/shm")) <= before
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def browser():
    with running_browser() as browser:
        yield browser


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask(server, prompt, **options):
    options = {"max_tokens": 8, **options}
    with server.openai() as client:
        answer = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, extra_body={"ignore_eos": True}, **options
        )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens, details.cached_tokens_by_tier


def requests_by_engine(server):
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(r'request_success_total\{engine="(\d)".*?\} (\d+)', text)
    counts = Counter()
    for engine, count in found:
        counts[engine] += int(count)
    return counts


def states(server):
    with server.http() as http:
        return [each["state"] for each in http.get("/page/data/replicas").json()["replicas"]]


def all_up(server):
    return states(server) == ["up"] * COUNT


def test_one_start_is_told_stage_by_stage_and_of_the_others_that_they_are_up(server):
    lines = [line.strip() for line in server.log.splitlines()]
    assert sum(line.startswith("Loading ") for line in lines) == 1
    assert sum(line.startswith("loading weights: ") for line in lines) == 1
    for number in range(COUNT):
        assert lines.count(f"replica {number} is up ({COUNT} in all)") == 1


def test_a_conversation_stays_where_its_prefix_is(server):
    """And all replicas give the same answers."""
    before = requests_by_engine(server)
    talks = [TALK.format(number) * 4 for number in range(6)]
    firsts = [ask(server, talk) for talk in talks]
    assert not any(cached for _, cached, _ in firsts)
    for talk, (text, _, _) in zip(talks, firsts, strict=True):
        again, cached, by_tier = ask(server, talk)
        assert again == text
        assert cached > 60 and set(by_tier) == {"device"}
    after = requests_by_engine(server)
    assert [after[name] - before[name] for name in "01"] == [6, 6]


def test_a_prompt_begun_just_now_draws_its_followers_along(server):
    before = requests_by_engine(server)
    prompt = "A prompt that nobody has asked before, and it is not short at all, " * 4
    threads = [threading.Thread(target=ask, args=(server, prompt)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((requests_by_engine(server) - before).values()) == [6]


def test_the_page_shows_each_replica(server, browser):
    """Chosen with a pointer or the arrow keys; on a phone, too."""
    words = "Zebras are asked about"
    before = requests_by_engine(server)
    ask(server, words)
    [(name, _)] = (requests_by_engine(server) - before).items()
    ask(server, "Others are asked about by the other")  # equals take turns
    with opened(browser, server.url) as page:
        page.wait_for_selector(".replica[data-state=up] >> nth=1")
        assert page.locator(".replica b").all_inner_texts() == ["Replica 0", "Replica 1"]
        assert all("found" in facts for facts in page.locator(".replica .facts").all_inner_texts())
        page.check(f"input[name=replica][value='{name}']")
        page.wait_for_selector(f"#stories .preview:has-text('{words}')")
        page.focus(f"input[name=replica][value='{name}']")
        page.keyboard.press("ArrowDown")
        other = str((int(name) + 1) % COUNT)
        assert page.input_value("input[name=replica]:checked") == other
        page.wait_for_selector("#tier-device canvas[data-columns]")
        page.wait_for_function("document.querySelector('#stories .preview') !== null")
        assert page.locator(f"#stories .preview:has-text('{words}')").count() == 0
        page.set_viewport_size({"width": 360, "height": 740})
        page.click(".views [data-view=cache]")
        assert page.locator(".replica").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_the_page_leaves_a_replica_that_is_down(server, browser):
    with opened(browser, server.url, forgiven="503 (Service Unavailable)") as page:
        page.wait_for_selector(".replica[data-state=up] >> nth=1")
        assert page.input_value("input[name=replica]:checked") == "0"
        os.kill(server.replica_pids[0], signal.SIGKILL)
        page.wait_for_selector("input[name=replica][value='1']:checked")
        page.wait_for_selector("#tier-device canvas[data-columns]")
        eventually(lambda: all_up(server))
        page.wait_for_selector(".replica[data-state=up] >> nth=1")
        assert page.input_value("input[name=replica]:checked") == "1"


def test_a_killed_replica_is_back_and_its_conversations_load_from_the_store(server, redis):
    """Whole answers that were under way come from another; streams that had begun say so."""
    talks = [TALK.format(10 + number) * 4 for number in range(6)]
    texts = [ask(server, talk)[0] for talk in talks]
    expected = ask(server, "Go on", max_tokens=300)[0]
    answers, streams, enough = [], [[] for _ in range(6)], threading.Event()

    def whole():
        answers.append(ask(server, "Go on", max_tokens=300)[0])

    def stream(parts):
        try:
            with server.openai() as client:
                for part in client.completions.create(
                    model="tiny", prompt=f"Stream {id(parts)}", max_tokens=8000, stream=True,
                    extra_body={"ignore_eos": True},
                ):  # fmt: skip
                    parts.append(part.choices[0].finish_reason)
                    if enough.is_set():
                        return
        except openai.APIError as error:
            parts.append(error)

    threads = [threading.Thread(target=stream, args=(parts,)) for parts in streams]
    threads += [threading.Thread(target=whole) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(streams))
    killed = server.replica_pids[1]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not is_running(killed))
    at_the_kill = [len(parts) for parts in streams]
    again = [ask(server, talk) for talk in talks]  # while it is away
    enough.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert answers == [expected] * 3
    broken = [parts[-1] for parts in streams if isinstance(parts[-1], openai.APIError)]
    assert 1 <= len(broken) <= 5 and all("ask again" in str(error) for error in broken)
    went_on = [len(parts) > before for parts, before in zip(streams, at_the_kill, strict=True)]
    assert went_on.count(True) >= 6 - len(broken)
    assert [text for text, _, _ in again] == texts
    assert sum("remote" in by_tier for _, _, by_tier in again) >= 2
    eventually(lambda: all_up(server))
    assert killed not in server.replica_pids


def test_a_killed_server_is_back_by_itself(server):
    talks = [TALK.format(30 + number) * 4 for number in range(3)]
    texts = [ask(server, talk)[0] for talk in talks]
    old = [server.server_pid, *server.replica_pids]
    errors = []

    def stream():
        client = server.openai()
        try:
            for _ in client.completions.create(
                model="tiny", prompt="Stream", max_tokens=8000, stream=True,
                extra_body={"ignore_eos": True},
            ):  # fmt: skip
                begun.set()
        except (openai.APIError, httpx.HTTPError) as error:
            errors.append(error)

    begun, thread = threading.Event(), threading.Thread(target=stream)
    thread.start()
    assert begun.wait(PATIENCE_S)
    os.kill(server.server_pid, signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert len(errors) == 1

    def is_ready():  # never refused: the address is held
        with server.http() as http:
            return http.get("/ready").status_code == 200

    eventually(is_ready)
    assert not any(map(is_running, old))
    again = [ask(server, talk) for talk in talks]
    assert [text for text, _, _ in again] == texts
    assert any(set(by_tier) == {"remote"} for _, _, by_tier in again)  # it has outlived them all


def test_replicas_are_renewed_one_after_the_other(server):
    """SIGHUP: a replica is always up, and no answer breaks off."""
    old, broken, done = server.replica_pids, [], threading.Event()

    def keep_asking():
        while not done.is_set():
            try:
                ask(server, "Are you there?", max_tokens=40)
            except openai.APIError as error:
                broken.append(error)
            done.wait(0.05)

    thread = threading.Thread(target=keep_asking)
    thread.start()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: not set(old) & set(server.replica_pids) and all_up(server))
    done.set()
    thread.join(PATIENCE_S)
    assert not broken
