"""The page at / in a real browser: it talks, explains its tokens, shows the cluster, and needs its server alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, Route, async_playwright, expect

from allspan.protos.api.errors import QueueFull
from support.fake_engine import ANSWER, FakeEngine
from support.gateway import Gateway, eventually, fake_engine, gateway

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

if CHROMIUM is None and not os.environ.get("ALLSPAN_REQUIRE_TOOLS"):
    pytest.skip("no chromium here: the page is not tested in a browser", allow_module_level=True)

CLUSTER = {
    "model": "tiny",
    "ready": True,
    "cause": "",
    "uptime_s": 4000.0,
    "replicas": {"total": 1, "ready": 1},
    "running": 12,
    "waiting": 3,
    "kv": {"pages_total": 100, "pages_used": 40, "pages_cached": 10, "page_size": 32},
    "prefix": {"queries": 200, "hits": 126},
    "tokens_per_s": {"prompt": 1203.2, "generation": 845.4},
    "ranks": [
        {"replica": -1, "rank": 0, "host": "a", "pid": 7, "where": "node 0", "state": "running", "heard_s": 0.1},
        {"replica": -1, "rank": 1, "host": "b", "pid": 8, "where": "node 1", "state": "running", "heard_s": 0.2},
    ],
}


@asynccontextmanager
async def opened(engine: FakeEngine | None = None, **context: Any) -> AsyncIterator[tuple[Gateway, Page]]:
    """A browser on the page of a gateway. Afterwards: no script has failed, and no other server was asked."""
    failures: list[str] = []
    asked: list[str] = []
    async with gateway(engine) as server, async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**context)
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        try:
            await page.goto(f"{server.http_address}/")
            yield server, page
        finally:
            await browser.close()
        assert failures == []
        assert {url for url in asked if not url.startswith(server.http_address)} == set()


async def ask(page: Page, text: str = "Hello") -> None:
    await page.fill("#prompt", text)
    await page.keyboard.press("Enter")


async def answer(page: Page) -> str:
    """The last answer's text, once it has ended."""
    last = page.locator(".message.assistant").last
    await last.locator(".end").wait_for()
    return await last.locator(".text").inner_text()


async def test_an_answer_streams_and_its_tokens_tell_how_likely_they_were() -> None:
    async with opened(fake_engine(step_s=0.005)) as (server, page):
        await ask(page)
        assert await answer(page) == ANSWER
        await page.hover(".token >> nth=4")
        tip = page.locator("#tip")
        assert await tip.locator("tr.chosen").inner_text() == "q\t60.7 %"
        assert await tip.locator("tr").count() == 5
        await page.mouse.move(1, 1)
        await expect(tip).to_be_hidden()
        # The same by keyboard, told to a screen reader.
        await page.focus("#log")
        for _ in range(2):
            await page.keyboard.press("ArrowRight")
        await expect(page.locator(".token.current")).to_have_text("h")
        assert "60.7 %" in await page.inner_text("#spoken")
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(".token.current")).to_have_text("T")
        # The conversation goes on from what was said.
        await ask(page, "And then?")
        await page.locator(".message.assistant .end").nth(1).wait_for()
        assert ANSWER.encode() in bytes(t for t in server.engine.last.prompt if t < 256)


async def test_controls_are_sent_when_they_are_set_and_wrong_ones_are_named() -> None:
    async with opened() as (server, page):
        await page.fill("#control-temperature", "0.35")
        await page.fill("#control-top_k", "7")
        await page.fill("#control-seed", "11")
        await page.fill("#control-max_tokens", "5")
        await page.fill("#stop-strings", "one\ntwo")
        await page.fill("#system", "Be brief.")
        await page.uncheck("#probabilities")
        await ask(page)
        assert await answer(page) == ANSWER[:5]
        asked = server.engine.last
        params = asked.params
        assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.35, 7, 11, 5)
        assert (params.stop, params.logprobs) == (("one", "two"), None)
        assert b"Be brief." in bytes(t for t in asked.prompt if t < 256)
        await page.reload()
        assert await page.input_value("#control-top_k") == "7"
        await page.fill("#control-top_p", "3")
        await ask(page)
        await expect(page.locator(".message .error")).to_contain_text("Top-p")
        assert len(server.engine.asked) == 1


@pytest.mark.parametrize("how", ["button", "escape"])
async def test_stopping_an_answer_stops_the_request(how: str) -> None:
    async with opened(fake_engine(endless=True, step_s=0.01)) as (server, page):
        await ask(page)
        await page.locator(".token >> nth=10").wait_for()
        await (page.click("#stop") if how == "button" else page.keyboard.press("Escape"))
        await eventually(lambda: server.engine.last.stopped)
        await expect(page.locator(".message .end")).to_have_text("stopped")
        await expect(page.locator("#send")).to_be_visible()
        await expect(page.locator("#prompt")).to_be_focused()


async def test_what_the_server_refuses_is_shown_and_the_next_message_works() -> None:
    async with opened() as (server, page):
        server.engine.refusal = QueueFull("7 wait, at most 7")
        await ask(page)
        await expect(page.locator(".message .error")).to_have_text("7 wait, at most 7 (try again in 1 s)")
        server.engine.refusal = None
        await ask(page)
        assert await answer(page) == ANSWER


async def test_output_is_text_whatever_it_looks_like() -> None:
    hostile = "<img src=x onerror=\"document.title='gone'\"><b>&amp;"
    async with opened(fake_engine(tokens=tuple(hostile.encode()))) as (_, page):
        for checked in (True, False):
            await page.set_checked("#probabilities", checked)
            await ask(page)
            assert await answer(page) == hostile
            await page.click("#new")
        assert await page.locator(".log img").count() == 0
        assert "gone" not in await page.title()


async def test_the_cluster_is_shown_and_a_missing_key_is_asked_for() -> None:
    async def cluster(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer s3cret":
            await route.fulfill(body=json.dumps(CLUSTER), content_type="application/json")
        else:
            await route.fulfill(status=401, body='{"error": {"message": "a key is needed"}}')

    async with opened() as (server, page):
        await page.route("**/cluster", cluster)
        await page.reload()
        await page.fill("#key", "s3cret")
        await page.keyboard.press("Enter")
        await expect(page.locator("#ranks tr")).to_have_count(2)
        await expect(page.locator("#key-section")).to_be_hidden()
        await expect(page.locator("#state")).to_have_text("ready")
        assert await page.inner_text("#running") == "12"
        assert await page.inner_text("#generation") == "845"
        assert await page.inner_text("#hits") == "63 %"
        assert await page.get_attribute("#kv", "value") is not None
        assert await page.evaluate("document.getElementById('kv').value") == 0.4
        assert "1,280 of 3,200 tokens" in await page.inner_text("#kv-text")
        assert "node 1" in await page.locator("#ranks tr").nth(1).inner_text()
        assert server.engine.asked == {}


CONTRAST = """
() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
                         return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                          if (!/, 0\\)$/.test(c)) return c; } return "rgb(255,255,255)"; };
  return ["h1", "#state", "#send", "#empty", ".figures dt", ".figures dd", "label[for=system]", "th", "summary"]
    .map((name) => { const e = document.querySelector(name);
                     const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
                     return [name, (a + 0.05) / (b + 0.05)]; });
}
"""


async def test_text_can_be_read_in_light_and_dark_and_the_choice_is_kept() -> None:
    async with opened(color_scheme="light") as (_, page):
        grounds = []
        for scheme in ("light", "dark"):
            poor = {name: ratio for name, ratio in await page.evaluate(CONTRAST) if ratio < 4.5}
            assert poor == {}, scheme
            grounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            await page.click("#theme")
        assert grounds[0] != grounds[1]
        await page.click("#theme")
        await page.reload()
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[1]


async def test_every_control_has_a_name_and_is_reached_by_keyboard() -> None:
    async with opened(viewport={"width": 400, "height": 700}) as (_, page):
        unnamed = await page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, summary')].filter((e) => !e.hidden &&"
            " !(e.innerText || e.labels?.length || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"
        )
        assert unnamed == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        await page.focus("#prompt")
        reached = set()
        for _ in range(40):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("document.activeElement.id"))
        wanted = {"new", "theme", "panel", "log", "send", "control-temperature", "system", "probabilities", "reset"}
        assert wanted - reached == set()


async def test_the_page_allows_no_foreign_content() -> None:
    async with gateway() as server:
        page = await server.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in page.text.replace("http-equiv", "")
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js"):
            assert (await server.http.get(path)).status_code == 404
