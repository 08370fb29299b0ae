"""The page in a real browser, against a real server."""

from __future__ import annotations

import re
from base64 import b64decode
from contextlib import ExitStack, contextmanager

import pytest
from browser import opened, running_browser
from server_process import ServerProcess

DETAIL = "#tier-device .detail"
IS_GOLD = """({x, y}) => {
    const canvas = document.querySelector("#tier-device canvas");
    const scale = devicePixelRatio;
    const [r, g, b] = canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data;
    return r - b > 80 && g - b > 20;
}"""
ANSWER = ".message.assistant"
WATCH_ANSWERS = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const text = document.querySelector(".message.assistant .text")?.textContent;
        if (text && text !== window.seen.at(-1)) window.seen.push(text);
    }).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def browser():
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    with opened(browser, server.url) as page:
        page.wait_for_selector("#tier-device canvas[data-columns]")
        yield page


def limit(page, tokens):
    page.evaluate(f"document.querySelector('[name=max_tokens]').value = {tokens}")


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_end(page):
    page.wait_for_function("document.querySelector('#send').textContent === 'Send'")


def body_of_next_request(page, act):
    with page.expect_request("**/v1/chat/completions") as request:
        act()
    return request.value.post_data_json


def shared_cells(page):
    """Where several hold a block, as the server says now."""
    answer = page.evaluate("fetch('page/data/blocks').then((answer) => answer.json())")
    device = answer["tiers"]["device"]
    holders = b64decode(device["picture"])[: device["cells"]]
    return [cell for cell, held in enumerate(holders) if held > 2]


def place_of(page, cell):
    canvas = page.locator("#tier-device canvas")
    columns, size = (int(canvas.get_attribute(f"data-{name}")) for name in ("columns", "size"))
    return {"x": cell % columns * size + size / 2 - 1, "y": cell // columns * size + size / 2 - 1}


def sideways(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_an_answer_streams(page):
    limit(page, 10)
    page.evaluate("document.querySelector('[name=temperature]').value = 0")
    page.evaluate(WATCH_ANSWERS)
    ask(page, "Count from one to twenty in words.")
    wait_for_end(page)
    seen = page.evaluate("window.seen")
    whole = page.text_content(f"{ANSWER} .text")
    assert len(seen) > 3 and all(whole.startswith(part) for part in seen)
    assert re.search(r"\d+ tokens · .* a second · the first after .* cached", facts(page))
    assert "smollm2" in page.text_content("#model")
    ask(page, "And the next one?")
    page.wait_for_function(f"document.querySelectorAll('{ANSWER} .facts:not(:empty)').length == 2")
    cached = int(re.search(r"([\d,]+) of [\d,]+ prompt", facts(page, 1))[1].replace(",", ""))
    assert cached > 0  # the conversation so far was found again


def facts(page, number=0):
    return page.locator(f"{ANSWER} .facts").nth(number).text_content()


@contextmanager
def two_that_share(server, text):
    """Two requests that go on as long as one likes, behind the same prompt."""
    body = {"prompt": text, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with server.http() as http, ExitStack() as open_streams:
        streams = [http.stream("POST", "/v1/completions", json=body) for _ in range(2)]
        lines = [open_streams.enter_context(stream).iter_lines() for stream in streams]
        for each in lines:
            next(each)
        yield
        del lines  # with the last reference to its lines a stream is closed


def test_a_shared_prefix_is_shown_as_shared(page, server):
    text = "The ferry leaves the island at noon and comes back when the tide allows it. " * 12
    counts = "document.querySelector('#tier-device .counts').textContent"
    with two_that_share(server, text):
        page.wait_for_function(f"/ [1-9][0-9]* shared/.test({counts})")
        cells = shared_cells(page)
        assert len(cells) >= 10
        place = place_of(page, cells[0])
        page.wait_for_function(IS_GOLD, arg=place)
        page.hover("#tier-device canvas", position=place)
        said = r"Block \d+shared by 2: request \d+ \(tokens \d+–\d+\), request .*(ferry|tide)"
        page.wait_for_function(f"/{said}/s.test(document.querySelector('{DETAIL}').textContent)")
    page.wait_for_function(f"/ 0 shared/.test({counts})")
    page.mouse.move(1, 1)
    page.wait_for_function(f"!({IS_GOLD})(arguments[0])".replace("arguments[0]", str(place)))


def test_questions_asked_together_find_each_others_blocks(page):
    limit(page, 4)
    page.click("#share")
    wait_for_end(page)
    told = page.locator(f"{ANSWER} .facts").all_text_contents()
    cached = [int(re.search(r"([\d,]+) of [\d,]+ prompt", each)[1]) for each in told]
    assert len(cached) == 6 and sum(each > 100 for each in cached) >= 5


def test_the_story_of_a_request(page):
    limit(page, 4)
    ask(page, "Say one word about paper.")
    wait_for_end(page)
    story = page.locator(".story:not(.running)", has_text="Say one word about paper").first
    story.locator("summary").click()
    story.locator(".events li").last.wait_for()
    stages = story.locator(".events .stage").all_text_contents()
    assert stages[:2] == ["queued", "matched"] and "prefill" in stages and "first token" in stages
    assert stages[-1] == "finished"
    assert story.locator(".timeline i").count() >= 2
    given_back = story.locator(".events .back").last.text_content()
    assert re.fullmatch(r"−\d+", given_back)
    label = story.locator(".pool").first.get_attribute("aria-label")
    assert re.search(r"\d+ free, \d+ cached, \d+ in use", label)


def test_settings_apply_and_are_kept(page):
    page.click("#settings-button")
    page.fill("[name=system]", "You are a pirate.")
    page.fill("[name=max_tokens]", "5")
    page.fill("[name=seed]", "7")
    page.locator("[name=temperature]").fill("0.25")
    assert page.text_content("output[for=temperature]") == "0.25"
    body = body_of_next_request(page, lambda: ask(page, "Who are you, and where do you live?"))
    assert body["max_tokens"] == 5 and body["seed"] == 7 and body["temperature"] == 0.25
    assert body["messages"][0] == {"role": "system", "content": "You are a pirate."}
    assert "top_k" not in body and "repetition_penalty" not in body
    wait_for_end(page)
    assert facts(page).startswith("5 tokens")
    page.reload()
    assert page.input_value("[name=max_tokens]") == "5"


def test_stop_ends_the_request(page):
    limit(page, 2000)
    ask(page, "Write a very long story about a river.")
    page.wait_for_function(f"document.querySelector('{ANSWER} .text')?.textContent")
    page.click("#send")
    wait_for_end(page)
    assert facts(page) == "Stopped."
    story = page.locator(".story:not(.running)", has_text="a very long story").first
    story.locator("summary").click()
    assert "stopped waiting" in story.locator(".events .what").last.text_content()


def test_what_is_said_is_never_markup(page):
    limit(page, 3)
    ask(page, "<img src=x onerror=\"document.title='broken'\"> <b>bold</b>")
    wait_for_end(page)
    assert page.locator(".message img, .message b, .story b").count() == 0
    assert page.title() == "Quire" and "<b>bold</b>" in page.text_content(".message.user")


def test_curves_move(page):
    limit(page, 2000)
    ask(page, "Write a long letter to a friend.")
    page.wait_for_function("/running [1-9]/.test(document.querySelector('#curves').textContent)")
    page.click("#send")
    wait_for_end(page)
    limit(page, 2)
    ask(page, "Hello.")
    page.wait_for_function(
        "/Time to first token[0-9]/.test(document.querySelector('#curves').textContent)"
    )
    labels = [c.get_attribute("aria-label") for c in page.locator("#curves canvas").all()]
    assert len(labels) == 4 and all("last two minutes; now" in label for label in labels)


CONTROLS = {"button", "textbox", "slider", "spinbutton", "combobox", "checkbox", "radio", "link"}
NAMED = CONTROLS | {"image", "application", "dialog", "form", "log", "region", "article", "status"}


def heard(page):
    """Role and name of all that a screen reader is told of, as Chromium works them out."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
    nodes = [node for node in tree["nodes"] if not node["ignored"]]
    return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]


def test_a_screen_reader_is_told_the_name_of_everything(page):
    limit(page, 4)
    ask(page, "Say one word about ink.")
    wait_for_end(page)
    story = page.locator(".story:not(.running)", has_text="Say one word about ink").first
    story.locator("summary").click()
    page.wait_for_selector(".story[open] .events li:nth-child(4)")
    page.click("#settings-button")
    told = heard(page)
    assert [role for role, name in told if role in NAMED and not name.strip()] == []
    assert {("slider", "Temperature"), ("slider", "Top p"), ("textbox", "Your message")} <= set(
        told
    )
    assert ("article", "You") in told and ("article", "The model") in told
    block_map = next(name for role, name in told if role == "application")
    assert block_map.startswith("Device: 512 blocks")
    visible = "input, select, textarea, button, a, summary, [role=slider]"
    shown = [each for each in page.locator(visible).all() if each.is_visible()]
    heard_controls = [role for role, _ in told if role in CONTROLS | {"DisclosureTriangle"}]
    assert len(heard_controls) == len(shown)  # and none is kept from it

    page.evaluate("document.getElementById('key-dialog').showModal()")
    told = heard(page)
    assert [role for role, name in told if role in NAMED and not name.strip()] == []
    assert {("dialog", "API key"), ("textbox", "API key"), ("button", "Use it")} <= set(told)


def test_rates_are_not_read_aloud_every_second_and_an_answer_is_once(page):
    assert page.get_attribute("#pulse", "aria-live") == "off"
    limit(page, 2000)
    ask(page, "Write a long letter about the sea.")
    page.wait_for_selector(f"{ANSWER}[aria-busy=true]")
    page.click("#send")
    wait_for_end(page)
    assert page.get_attribute(ANSWER, "aria-busy") is None


def test_by_keyboard_alone(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.focus("#settings-button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "system"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "settings-button"
    page.focus("#tier-device canvas")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert "Block 1" in page.text_content(DETAIL)
    page.keyboard.press("End")
    assert "Block 511" in page.text_content(DETAIL)
    limit(page, 4)
    page.focus("#prompt")
    page.keyboard.type("Say hello.")
    page.keyboard.press("Enter")
    wait_for_end(page)
    story = page.locator(".story:not(.running)", has_text="Say hello").first
    story.locator("summary").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".story[open] .events li:nth-child(4)")


@pytest.mark.parametrize("width", [320, 768])
def test_a_phone_does_not_scroll_sideways(browser, server, width):
    phone = {"viewport": {"width": width, "height": 740}, "has_touch": True}
    with opened(browser, server.url, **phone) as page:
        assert sideways(page) == 0
        page.click("#settings-button")
        page.fill("[name=max_tokens]", "6")
        assert sideways(page) == 0
        page.click("#settings-button")
        ask(page, "unbroken" * 60)
        wait_for_end(page)
        assert sideways(page) == 0
        page.click(".views [data-view=cache]")
        page.wait_for_selector("#tier-device canvas[data-columns]")
        page.tap("#tier-device canvas", position={"x": 8, "y": 8})
        page.wait_for_function(f"/Block/.test(document.querySelector('{DETAIL}').textContent)")
        assert sideways(page) == 0 and not page.is_visible("#chat")
        page.click(".views [data-view=requests]")
        page.locator(".story summary").first.click()
        page.wait_for_selector(".events li")
        assert sideways(page) == 0


def test_dark_and_light(browser, server):
    def ground(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    grounds = set()
    for scheme in ("light", "dark"):
        with opened(browser, server.url, color_scheme=scheme) as page:
            grounds.add(ground(page))
            own = {page.click("#theme") or ground(page) for _ in range(2)}
            assert len(own) == 2
    assert len(grounds) == 2


def test_nothing_comes_from_elsewhere(browser, server):
    """And the page's policy, which forbids it, lets the page itself work."""
    asked = []
    with opened(browser, server.url, bypass_csp=False) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        page.wait_for_selector("#tier-device canvas[data-columns]")
        limit(page, 2)
        ask(page, "Hello.")
        page.wait_for_selector(f"{ANSWER} .facts:not(:empty)")
    assert asked and all(url.startswith(server.url) for url in asked)


def test_each_sees_its_own(browser, tiny, tmp_path):
    """With keys the page asks for one; only an operator sees what others do."""
    keys = tmp_path / "keys"
    keys.write_text("sk-one\nsk-two\nsk-boss operator\n")
    server = ServerProcess.tiny(tiny, "--api-keys-file", str(keys))
    try:
        seen = {key: page_with_key(browser, server, key) for key in ("sk-one", "sk-two", "sk-boss")}
    finally:
        assert server.stop() == 0, server.log
    assert seen["sk-one"] == ["I am sk-one"] and seen["sk-two"] == ["I am sk-two"]
    assert sorted(seen["sk-boss"]) == ["I am sk-boss", "I am sk-one", "I am sk-two"]


def page_with_key(browser, server, key):
    """What a holder of the key sees, after a question of its own."""
    with opened(browser, server.url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "sk-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error:not(:empty)")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#tier-device canvas[data-columns]")
        assert page.evaluate("Object.values(localStorage).join()").find(key) < 0
        limit(page, 2)
        ask(page, f"I am {key}")
        wait_for_end(page)
        page.wait_for_selector(f".story:not(.running):has-text('{key}')")
        return page.locator(".story .preview").all_text_contents()
