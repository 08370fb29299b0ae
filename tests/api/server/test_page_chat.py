"""The page's chat: Markdown, copies, retries, edits, thoughts, what is kept and what is cut off.

What the model says is written here, so that it has all that the page must show.
"""

from __future__ import annotations

import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import opened, running_browser
from server_process import ServerProcess

ANSWER = ".message.assistant"
MARKDOWN = """## Steps

Some **bold** and `code`, a [link](https://example.com) and a [trap](javascript:alert(1)).

- one
- two
  - inner

1. first
2. second

```python
print("<b>no</b>")
```

> quoted

| a | b |
| --- | --- |
| 1 | 2 |

<img src=x onerror="document.title='broken'"> at the end."""


def events(text: str, thought: str = "", finish: str = "stop") -> str:
    deltas = [{"reasoning_content": thought}] if thought else []
    deltas += [{"content": text[at : at + 5]} for at in range(0, len(text), 5)]
    told = [{"choices": [{"delta": delta}]} for delta in deltas]
    told.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    cached = {"cached_tokens": 512, "cached_tokens_by_tier": {"device": 384, "host": 128}}
    usage = {"prompt_tokens": 600, "completion_tokens": 9, "prompt_tokens_details": cached}
    told.append({"choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in told) + "data: [DONE]\n\n"


class Model:
    """Answers the page's requests with texts that are known, and remembers what it was asked."""

    def __init__(self, page) -> None:
        self.answer = events("Hello.")
        self.asked: list[list[dict]] = []
        page.route("**/v1/chat/completions", self._respond)

    def _respond(self, route) -> None:
        self.asked.append(route.request.post_data_json["messages"])
        route.fulfill(status=200, content_type="text/event-stream", body=self.answer)


@pytest.fixture(scope="module")
def browser():
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def large(tiny):
    """A pool with so many blocks that they would be small."""
    server = ServerProcess.tiny(tiny, "--num-blocks", "5000")
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture
def page(browser, large):
    with opened(browser, large.url) as page:
        yield page


@pytest.fixture
def model(page):
    return Model(page)


def ask(page, text: str = "Hi", answers: int = 1) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    wait_for_answers(page, answers)


def wait_for_answers(page, number: int) -> None:
    done = f"{ANSWER}:not(.streaming) .facts:not(:empty)"
    page.wait_for_function(f"document.querySelectorAll('{done}').length === {number}")


def test_markdown_is_shown_and_html_is_not(page, model):
    model.answer = events(MARKDOWN)
    ask(page)
    text = page.locator(f"{ANSWER} .text")
    assert text.locator("h4").text_content() == "Steps"
    assert text.locator("strong").text_content() == "bold"
    assert text.locator("p code").text_content() == "code"
    assert text.locator("a").get_attribute("href") == "https://example.com"
    assert "[trap](javascript:alert(1))" in text.text_content()
    assert text.locator("ul > li").count() == 3 and text.locator("ul ul > li").count() == 1
    assert text.locator("ol > li").all_text_contents() == ["first", "second"]
    assert text.locator("pre code").text_content() == 'print("<b>no</b>")'
    assert text.locator("blockquote").text_content() == "quoted"
    assert text.locator("td").all_text_contents() == ["1", "2"]
    assert text.locator("img, pre b").count() == 0 and page.title() == "Quire"


def test_code_and_answers_can_be_copied(page, model):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    model.answer = events(MARKDOWN)
    ask(page)
    page.get_by_role("button", name="Copy code").click()
    page.wait_for_function("document.getElementById('said').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>no</b>")'
    page.get_by_role("button", name="Copy this answer").click()
    page.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('## '))")


def test_an_answer_is_asked_for_again_and_a_question_is_changed(page, model):
    ask(page, "One", 1)
    ask(page, "Two", 2)
    model.answer = events("Again.")
    page.get_by_role("button", name="Ask again for this answer").last.click()
    page.wait_for_function(
        f"document.querySelector('{ANSWER}:last-child .text')?.textContent === 'Again.'"
    )
    assert model.asked[-1] == model.asked[-2] and len(model.asked) == 3
    page.get_by_role("button", name="Edit your message").first.click()
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    wait_for_answers(page, 1)
    assert model.asked[-1] == [{"role": "user", "content": "One more"}]
    assert page.locator(".message.user .text").all_text_contents() == ["One more"]
    page.get_by_role("button", name="Edit your message").click()
    page.keyboard.press("Escape")
    assert page.locator(".message.user .text").all_text_contents() == ["One more"]


def test_the_conversation_outlives_a_reload_and_new_chat_ends_it(page, model):
    model.answer = events("Hello **you**.", thought="Be kind.", finish="length")
    ask(page, "One")
    page.reload()
    wait_for_answers(page, 1)
    assert page.locator(f"{ANSWER} strong").text_content() == "you"
    assert page.locator(".thought .words").text_content() == "Be kind."
    assert page.is_visible(".cut")
    ask(page, "Two", 2)
    assert [each["content"] for each in model.asked[-1]] == ["One", "Hello **you**.", "Two"]
    page.click("#new-chat")
    page.reload()
    page.wait_for_selector(".welcome")


def test_thoughts_are_folded_and_an_answer_that_was_cut_off_says_so(page, model):
    model.answer = events("Yes.", thought="Let me see.", finish="length")
    ask(page)
    assert page.text_content(f"{ANSWER} .text") == "Yes."
    assert page.get_attribute(".thought", "open") is None
    assert page.text_content(".thought summary").startswith("Thought for")
    page.locator(".thought summary").click()
    assert page.is_visible(".thought .words")
    assert "cut off" in page.text_content(".cut")
    assert "512 of 600 prompt tokens cached, 128 from host memory" in page.text_content(".facts")
    model.answer = events("Yes.")
    ask(page, "And now?", 2)
    assert not page.locator(".cut").last.is_visible()


def test_the_map_shows_what_is_used_and_can_show_all(page, large):
    canvas = page.locator("#tier-device canvas[data-columns]")
    canvas.wait_for()
    size = int(canvas.get_attribute("data-size"))
    assert size == 15 and int(canvas.get_attribute("data-cells")) < 5000
    page.get_by_role("button", name="more, all free").click()
    assert int(canvas.get_attribute("data-cells")) == 5000
    assert int(canvas.get_attribute("data-size")) < 15
    page.get_by_role("button", name="Zoom to what is used").click()
    assert int(canvas.get_attribute("data-size")) == 15


def test_fingers_are_told_to_tap(browser, large):
    phone = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
    with opened(browser, large.url, **phone) as page:
        page.click(".views [data-view=cache]")
        page.wait_for_function(
            "document.querySelector('#tier-device .detail')?.textContent.startsWith('Tap a block')"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_serious(browser, large, scheme, width):
    view = {"viewport": {"width": width, "height": 860}, "color_scheme": scheme}
    with opened(browser, large.url, **view) as page:
        model = Model(page)
        model.answer = events(MARKDOWN, thought="Let me see.", finish="length")
        ask(page)
        page.click("#settings-button")
        found = Axe().run(page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, [(each["id"], each["nodes"][0]["html"][:200]) for each in serious]
