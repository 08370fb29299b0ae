"""The system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

WAIT_MS = 60_000


@contextmanager
def running_browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("chromium is not installed (scripts/install_test_servers.sh does it)")
    flags = ["--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, forgiven: str = "401 (Unauthorized)", **options: object
) -> Iterator[Page]:
    """A page in a profile of its own; what it complains of fails the test.

    What is `forgiven` the browser itself says: of a page without its key, for one.
    """
    # Playwright's own waiting is a script that the page's policy would not let in.
    usual = {"viewport": {"width": 1280, "height": 860}, "bypass_csp": True}
    context = browser.new_context(**usual | options)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    others = [each for each in complaints if forgiven not in each]
    assert not others, others
