"""The console in a real browser, over a real server with a scripted engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.console.events import EventHub
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.server.config import ServerConfig
from tests.console.browser import Tab, launched, tab_of, until
from tests.console.threaded_stage import serving
from tests.patience import PATIENCE_S
from tests.server.scripted_client import say
from tests.server.stage import Stage

ANSWER = (
    "# Title\n\nSome **bold** text, `code`, [a link](https://example.org/x), [a trap](javascript:alert(1)) "
    "and ![a picture](https://example.org/p.png).\n\n- one\n- two\n\n<b>not markup</b>\n\nThe end."
)
AXE = Path(__file__).parent / "axe-core-4.14.0.min.js.gz"  # as in the npm package; MPL-2.0
SEEN = {"chat": ".reply-foot", "live": ".model-grid", "requests": "tbody tr"}
KEY = "a-key-of-this-test"
HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> {{ messages }}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as one:
        yield one


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Stage]]:
    with serving(lambda: Stage(script=say(ANSWER, pause_s=0.001))) as found:
        yield found


@pytest.fixture
def tab(browser: Any, server: tuple[str, Stage]) -> Iterator[Tab]:
    with tab_of(browser, server[0]) as one:
        yield one


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.wait_for_selector(".composer select option", state="attached")
    page.press("#prompt", "Enter")


def test_a_reply_streams_as_markdown_and_nothing_in_it_is_fetched_or_run(tab: Tab) -> None:
    page = tab.open()
    send(page, "hello")
    page.wait_for_selector(".reply[data-state=done] .reply-foot")
    reply = page.locator(".markdown")
    assert reply.locator("h1").inner_text() == "Title"
    assert reply.locator("li").count() == 2
    assert reply.locator("b, img").count() == 0
    assert "<b>not markup</b>" in reply.inner_text()
    assert reply.inner_text().count("The end.") == 1
    links = {one.inner_text(): one.get_attribute("href") for one in reply.locator("a").all()}
    assert links == {"a link": "https://example.org/x", "a trap": None}
    figures = page.locator(".reply-figures").inner_text()
    assert re.search(r"Output\s+\d+", figures), figures
    page.get_by_role("button", name="Request").click()
    shown = page.locator("dialog pre").inner_text()
    assert shown.startswith(f"curl {tab.base_url}/v1/chat/completions")
    page.get_by_role("tab", name="Python").click()
    compile(page.locator("dialog pre").inner_text(), "snippet", "exec")


def test_a_long_reply_is_whole_also_after_another_page_was_open(browser: Any) -> None:
    """Its text is written in parts, and blocks out of sight are not laid out."""
    lines = [f"- item {number} of the **long** list" for number in range(900)]
    answer = "\n".join(lines) + "\n\n3. three\n4. four\n"
    with (
        serving(lambda: Stage(script=say(answer, pause_s=0.0))) as (url, _),
        tab_of(browser, url) as tab,
    ):
        page = tab.open()
        send(page, "a list")
        page.wait_for_selector(".reply[data-state=done] .reply-foot")
        items = "document.querySelectorAll('.markdown li').length"
        for _ in range(2):
            until(page, items, 902)
            texts = page.evaluate(
                "[...document.querySelectorAll('.markdown ul li')].map((li) => li.textContent)"
            )
            assert texts == [f"item {number} of the long list" for number in range(900)]
            assert page.evaluate("document.querySelector('.markdown ol').start") == 3
            page.click('nav a[href="#/requests"]')
            page.wait_for_selector(".timeline")
            page.click('nav a[href="#/chat"]')


def test_the_page_asks_for_few_things_and_a_hidden_idle_tab_for_nothing(tab: Tab) -> None:
    page = tab.open()
    page.wait_for_selector(".connection[data-state=live]")
    page.wait_for_selector(".composer select option", state="attached")
    data = [path for path in tab.requests if not path.startswith("/console/assets/") and path != "/console"]
    assert sorted(data) == ["/console/events", "/v1/models"]
    assert len(tab.requests) == len(set(tab.requests))
    page.click('nav a[href="#/live"]')
    page.wait_for_selector(".model-grid")
    assert tab.requests.count("/console/events") == 1  # Live needs no further stream
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_selector(".connection[data-state=paused]")
    before = len(tab.requests)
    page.wait_for_timeout(1500)
    assert len(tab.requests) == before
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector(".connection[data-state=live]")
    assert len(tab.requests) == before + 1


def test_requests_are_shown_once_with_their_record(tab: Tab) -> None:
    page = tab.open()
    send(page, "one request")
    page.wait_for_selector(".reply-foot")
    page.click('nav a[href="#/requests"]')
    page.wait_for_selector("tbody tr")
    ids = [row.get_attribute("aria-label") for row in page.locator("tbody button").all()]
    assert len(ids) == len(set(ids))
    page.locator("tbody button").first.click()
    record = page.locator(".detail").inner_text()
    assert "ttft_s" in record
    trace = page.locator(".trace").get_attribute("aria-label")
    assert re.fullmatch(r"request: .+, engine.queue: .+, engine.prefill: .+, engine.decode: .+", trace), trace
    assert "done" in record


def test_the_keyboard_alone_is_enough(tab: Tab) -> None:
    page = tab.open()
    page.wait_for_selector(".composer select option", state="attached")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"Chat", "Live", "Requests", "Settings", "prompt"} <= reached
    page.focus("#prompt")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply-foot")
    page.focus(".reply-figures .figure")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.locator(".reply-figures .tip").first.is_visible()


def test_every_page_is_accessible_in_both_themes_and_fits_360_px(
    browser: Any, server: tuple[str, Stage]
) -> None:
    script = gzip.decompress(AXE.read_bytes()).decode()
    for scheme, width in (("light", 1280), ("dark", 360)):
        with tab_of(browser, server[0], color_scheme=scheme) as tab:
            page = tab.page
            page.set_viewport_size({"width": width, "height": 760})
            tab.open()
            send(page, "hello")
            page.wait_for_selector(".reply-foot")
            for name in ("chat", "live", "requests"):
                page.click(f'nav a[href="#/{name}"]')
                page.wait_for_selector(SEEN[name])
                if name == "chat":
                    page.get_by_role("button", name="Settings").first.click()
                    page.wait_for_selector("#settings")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                page.evaluate(script)  # by the debugger's way, which the page's policy does not forbid
                found = page.evaluate("axe.run().then((result) => result.violations)")
                shown = [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found]
                assert shown == [], f"{name}, {scheme}"
                if name == "chat":
                    page.get_by_role("button", name="Close settings").click()


def test_a_key_stays_in_the_tab_and_goes_to_this_host_alone(browser: Any) -> None:
    config = ServerConfig(api_keys=(KEY,))
    with serving(lambda: Stage(script=say("fine"), config=config)) as (url, _), tab_of(browser, url) as tab:
        sent: list[dict[str, str]] = []
        tab.page.on("request", lambda request: sent.append(request.headers))
        page = tab.open()
        page.wait_for_selector("dialog[open] input:focus")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(".connection[data-state=live]")
        send(page, "hello")
        page.wait_for_selector(".reply[data-state=done]")
        assert KEY not in page.content()
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert KEY not in json.dumps(tab.requests)
        assert any(headers.get("authorization") == f"Bearer {KEY}" for headers in sent)
        page.get_by_role("button", name="Request").click()
        assert KEY not in page.locator("dialog").inner_text()


def test_a_stream_that_stands_still_without_an_end_is_opened_again(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, opened = EventHub.stream, []

    async def stalled(self: EventHub, topics: Any, last_id: str = "") -> AsyncIterator[bytes]:
        opened.append(last_id)
        async for part in stream(self, topics, last_id):
            yield part
            if len(opened) == 1:
                await asyncio.sleep(PATIENCE_S)  # as a connection whose other end has gone

    monkeypatch.setattr(EventHub, "stream", stalled)
    with serving(lambda: Stage(script=say("fine"))) as (url, _), tab_of(browser, url) as tab:
        page = tab.open()
        page.wait_for_selector(".connection[data-state=lost]")
        page.wait_for_selector(".connection[data-state=live]")
        assert opened[0] == ""
        assert opened[1] != ""  # it continues the first


def test_a_tool_s_result_is_sent_with_its_call_and_a_reload_keeps_the_conversation(browser: Any) -> None:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        said = "It is sunny." if b"sunny" in bytes(one for one in prompt if one < 256) else CALL
        async for chunk in say(said)(prompt, params):
            yield chunk

    with serving(lambda: Stage(script=script, template=HERMES)) as (url, _), tab_of(browser, url) as tab:
        bodies: list[dict[str, Any]] = []
        tab.page.on(
            "request",
            lambda one: bodies.append(one.post_data_json) if one.url.endswith("completions") else None,
        )
        page = tab.open()
        page.get_by_role("button", name="Settings").first.click()
        page.get_by_label("Tools").fill(json.dumps([WEATHER]))
        page.get_by_role("button", name="Close settings").click()
        send(page, "How is the weather?")
        page.get_by_label("Result of weather").fill("sunny, 20 degrees")
        page.reload()
        page.get_by_label("Result of weather").fill("sunny, 20 degrees")
        page.get_by_role("button", name="Send result").click()
        page.wait_for_selector("text=It is sunny.")
        user, assistant, tool = bodies[-1]["messages"]
        assert user["content"] == "How is the weather?"
        (call,) = assistant["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
        assert tool == {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 20 degrees"}
        send(page, "Thanks.")
        until(page, "document.querySelectorAll('.reply[data-state=done]').length", 3)
        page.reload()
        until(page, "document.querySelectorAll('.reply').length", 3)
        assert "It is sunny." in page.locator(".log").inner_text()
        assert [one["role"] for one in bodies[-1]["messages"]] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
        ]


def test_a_theme_is_kept_and_a_new_chat_needs_no_server(tab: Tab) -> None:
    page = tab.open()
    send(page, "hello")
    page.wait_for_selector(".reply-foot")
    page.get_by_role("button", name="Use the dark theme").click()
    page.context.set_offline(True)
    page.get_by_role("button", name="New chat").click()
    page.wait_for_selector(".empty")
    page.context.set_offline(False)
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_heap_does_not_grow_with_frames(browser: Any, server: tuple[str, Stage]) -> None:
    """Short: thousands of synthetic frames and records. The hour with real ones is the slow test's."""
    with tab_of(browser, server[0]) as tab:
        page = tab.open("#/requests")
        page.wait_for_selector(".timeline")
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.enable")

        def heap() -> float:
            session.send("HeapProfiler.collectGarbage")
            return float(session.send("Runtime.getHeapUsage")["usedSize"])

        feed = """async (from) => {
          const { feed } = await import("console/events.js");
          const hear = (event, data) => feed.hear({ event, id: "x.1", data: JSON.stringify(data) });
          const times = { admitted: 3, first: 40, last: 90, end: 91, sent: 92, chunks: [3] };
          for (let n = from; n < from + 3000; n++) {
            const record = { id: `r${n}`, model: "m", path: "/p", at: Date.now() - 5000, state: "done" };
            hear("requests", [{ ...record, ...times, prompt: 5, out: 9 }]);
            hear("metrics.frame", { at: n, models: [{ name: "m", ready: true, steps: n }] });
          }
        }"""
        page.evaluate(feed, 0)  # fills every bounded list
        first = heap()
        for turn in (1, 2):
            page.evaluate(feed, 3000 * turn)
        assert heap() - first < 2_000_000
