"""The console over a real server with a real model, whose engine is killed, and then the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LiveServer, await_ready, start_server
from tests.console.browser import Tab, launched, tab_of, until

LONG = """{"type": "string", "minLength": 8000}"""
IDS = """[...document.querySelectorAll("tbody button")].map((one) => one.getAttribute("aria-label"))"""


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    made = start_server(tmp_path_factory.mktemp("console") / "server.log")
    try:
        await_ready(made)
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture
def tab(server: LiveServer) -> Iterator[Tab]:
    with launched() as browser, tab_of(browser, server.base_url) as one:
        yield one


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.wait_for_selector(".composer select option", state="attached")
    page.press("#prompt", "Enter")


def engine_of(server: LiveServer) -> int:
    """The engine is the server's child."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    engines = [int(one) for one in children if b"engine" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return engines[-1] if engines else int(children[-1])


def test_an_answer_streams_survives_its_engine_and_is_shown_once(server: LiveServer, tab: Tab) -> None:
    page = tab.open()
    send(page, "Say hello in one word.")
    page.wait_for_selector(".reply[data-state=done] .reply-figures")
    whole = page.locator(".markdown").first.text_content()
    assert whole
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answer schema").fill(LONG)  # the answer cannot end early
    page.get_by_label("Max tokens").fill("4000")
    send(page, "Tell a story about a ridge.")
    page.wait_for_selector(".reply[data-state=streaming]")
    os.kill(engine_of(server), signal.SIGKILL)
    page.wait_for_selector(".reply[data-state=failed] .notice")  # the client is told
    assert page.locator(".markdown").first.text_content() == whole  # what came before stays
    await_ready(server)  # the supervisor has started another engine
    page.click('nav a[href="#/live"]')
    page.wait_for_selector(".model-grid")
    page.click('nav a[href="#/chat"]')
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector(".reply[data-state=streaming]")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(".reply[data-state=stopped]")
    assert page.locator(".turn").count() == 2
    page.click('nav a[href="#/requests"]')
    until(page, f"{IDS}.length", 3)
    ids = page.evaluate(IDS)
    assert len(set(ids)) == 3
    states = page.locator("tbody").inner_text()
    assert "failed" in states
    assert "aborted" in states

    os.kill(server.pid, signal.SIGKILL)
    page.wait_for_selector(".notice[data-tone=alarm] >> text=Not connected")
    assert page.evaluate(IDS) == ids  # the history stays readable
    page.click('nav a[href="#/chat"]')
    assert page.locator(".markdown").first.text_content() == whole
