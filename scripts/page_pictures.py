"""The pictures of the page in docs/images, taken in Chromium from a server that runs.

    quire serve --num-blocks 768 --host-cache-bytes 300MB --ssd-cache-dir FOLDER \\
        --ssd-cache-bytes 500MB --lora-modules harbour=ADAPTER
    python scripts/page_pictures.py http://127.0.0.1:8000 docs/images

The server computes what the cache and the curves show. The conversation is written here, so that
it has all that the page can show, whatever the model knows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

BUSY_S = 100.0  # until the curves have something to show
SCROLLED = {"light": 0}  # where the conversation stands, if not at its end
TOPICS = ("bees", "bridges", "clocks", "glaciers", "ink", "lighthouses", "maps", "tides")
ANSWER = """A block holds the keys and values of **16 tokens**. Requests that begin alike have \
the *same* blocks:

1. the prompt is cut into blocks, and each gets a key;
2. blocks that the index knows are shared, up to the first miss;
3. only the rest is computed.

```python
def shared_blocks(prompt, index, size=16):
    key, found = b"", []
    for at in range(0, len(prompt) - size + 1, size):
        key = digest(key, prompt[at : at + size])
        if key not in index:
            break
        found.append(index[key])
    return found
```

| tier | found in | when |
| --- | --- | --- |
| device | the pool | at once |
| host | memory | before the step |
| SSD | a file | while others run |"""
CONVERSATION = [
    {"role": "user", "content": "How do two requests come to share a block?"},
    {
        "role": "assistant",
        "thought": "They ask about prefix caching. I should say what a key is made of, and show the"
        " loop.",
        "took": 3.4,
        "content": ANSWER,
        "finish": "stop",
        "facts": "smollm2 · 214 tokens · 31.6 a second · the first after 0.42\u00a0s · 512 of 561"
        " prompt tokens cached, 128 from host memory",
    },
    {"role": "user", "content": "And in a sentence?"},
    {
        "role": "assistant",
        "thought": "",
        "content": "Two requests share a block when their prompts are the same up to its last"
        " token, so that",
        "finish": "length",
        "facts": "harbour · 24 tokens · 33.0 a second · the first after 0.18\u00a0s · 784 of 791"
        " prompt tokens cached",
    },
]


class Traffic:
    """Questions about a few texts, from several clients at once."""

    def __init__(self, url: str, num_clients: int = 6) -> None:
        self._url = url
        self._is_over = False
        models = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"]
        self._models = [each["id"] for each in models]
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self._url, timeout=None) as http:
            for turn in itertools.count():
                topic = TOPICS[(client // 2 + turn // 2) % len(TOPICS)]
                body = {
                    "model": self._models[-1 if client == 0 else 0],
                    "messages": [
                        {
                            "role": "system",
                            "content": f"Here is a text about {topic}. {_text(topic)}",
                        },
                        {
                            "role": "user",
                            "content": f"Question {turn} of reader {client}: what is new?",
                        },
                    ],
                    "max_tokens": 20 + 15 * client,
                    "stream": True,
                }
                with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if self._is_over:
                            return


def _text(topic: str) -> str:
    return " ".join(f"Part {part}: what travellers say of {topic}." for part in range(18))


def open_page(browser: Browser, url: str, theme: str, **options: object) -> Page:
    """With the conversation of an earlier visit."""
    usual = {"viewport": {"width": 1360, "height": 1000}, "bypass_csp": True}
    context = browser.new_context(**usual | options)  # type: ignore[arg-type]
    kept = {"quire-chat": json.dumps(CONVERSATION)}
    context.add_init_script(f"Object.assign(sessionStorage, {json.dumps(kept)})")
    context.add_init_script(f"localStorage.setItem('quire-theme', '{theme}')")
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#tier-device canvas", state="attached")
    return page


def take_all(browser: Browser, url: str, folder: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
    phone |= {"is_mobile": True, "has_touch": True}
    pages = {
        "light": open_page(browser, url, "light"),
        "dark": open_page(browser, url, "dark"),
        "phone": open_page(browser, url, "light", **phone),
        "phone-cache": open_page(browser, url, "dark", **phone),
    }
    pages["phone-cache"].click(".views [data-view=cache]")
    time.sleep(BUSY_S)
    for name, page in pages.items():
        page.evaluate(f"document.getElementById('messages').scrollTop = {SCROLLED.get(name, 1e6)}")
        if name == "light":
            page.click(".thought summary")
            page.hover("#tier-device canvas", position={"x": 8, "y": 8})
            page.wait_for_selector("#tier-device .words:not(:empty)")
        page.screenshot(path=folder / f"page-{name}.png")
    page = pages["light"]
    page.click(".story:not(.running) summary")
    page.wait_for_selector(".story[open] .events li")
    page.locator(".story[open]").screenshot(path=folder / "page-story.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        with Traffic(args.url):
            take_all(browser, args.url, args.folder)
        browser.close()


if __name__ == "__main__":
    main()
