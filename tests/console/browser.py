"""Debian's Chromium, driven by Playwright, with what every test of the console checks: no request to another
host, no violation of the page's policy, no error in a script.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE_S

FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
NAMES = ("chromium-headless-shell", "chromium")
_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
"""


def chromium() -> str:
    """The browser's path; skips the test where there is none. `.ci/services` installs it and names it."""
    path = os.environ.get("RIDGELINE_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: install the Debian package chromium-headless-shell")
    return path


@contextmanager
def launched() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page, and what it did that it must not."""

    page: Any
    base_url: str
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.add_init_script(_VIOLATIONS)
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))

    def _asked(self, url: str) -> None:
        self.requests.append(urlsplit(url).path)
        if urlsplit(url).scheme in ("http", "https") and not url.startswith(self.base_url):
            self.problems.append(f"foreign request: {url}")

    def open(self, fragment: str = "") -> Any:
        self.page.goto(f"{self.base_url}/console{fragment}")
        return self.page

    def check(self) -> None:
        self.problems += [f"policy: {one}" for one in self.page.evaluate("window.violations ?? []")]
        assert self.problems == []


@contextmanager
def tab_of(browser: Any, base_url: str, **options: Any) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    try:
        tab = Tab(context.new_page(), base_url)
        tab.begin()
        yield tab
        tab.check()
    finally:
        context.close()


def until(page: Any, script: str, wanted: Any) -> None:
    """Wait until a script gives this value. Playwright's own way evaluates text, which the page forbids."""
    end, found = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < end:
        if (found := page.evaluate(script)) == wanted:
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{script} gives {found!r}, not {wanted!r}")
