"""The page and its server: what it refuses, when it is gone, its keys, its cluster; and the page's own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, expect

from allspan.protos.api.errors import QueueFull, Unavailable
from support.fake_engine import ANSWER
from support.gateway import fake_engine, gateway
from support.page import answer, ask, opened, require_chromium, scripted

require_chromium()
pytestmark = pytest.mark.asyncio(loop_scope="session")

CLUSTER = {
    "model": "tiny",
    "ready": True,
    "cause": "",
    "uptime_s": 4000.0,
    "replicas": {"total": 1, "ready": 1},
    "running": 12,
    "waiting": 3,
    # Two cache groups: their pages cannot be added up.
    "kv": {
        "pages_total": 130,
        "pages_used": 45,
        "pages_cached": 10,
        "page_size": 32,
        "usage": 0.4,
        "free_tokens": 1920,
    },
    "prefix": {"queries": 200, "hits": 126},
    "experts": [{"layer": 0, "imbalance": 1.04}, {"layer": 1, "imbalance": 1.3849}],
    "tokens_per_s": {"prompt": 1203.2, "generation": 845.4},
    "ranks": [
        {"replica": -1, "rank": 0, "host": "a", "pid": 7, "where": "node 0", "state": "running", "heard_s": 0.1},
        {"replica": -1, "rank": 1, "host": "b", "pid": 8, "where": "node 1", "state": "running", "heard_s": 0.2},
    ],
}


async def refused(page: Page, text: str, *says: str) -> None:
    """Sends a message that is refused: it stays in its field, and the page says why and what to do."""
    await ask(page, text)
    for words in says:
        await expect(page.locator("#notice")).to_contain_text(words)
    assert await page.input_value("#prompt") == text
    await expect(page.locator("#send")).to_be_visible()


async def test_a_refused_message_is_kept_and_the_page_says_what_to_do(browser: Browser) -> None:
    async with opened(browser, fake_engine(max_model_len=300)) as (server, page):
        server.engine.refusal = QueueFull("7 wait, at most 7")
        await refused(page, "Hello", "7 wait, at most 7", "Try again in 1")
        server.engine.refusal = None
        await page.click("#notice button")
        assert await answer(page) == ANSWER
        await expect(page.locator(".message")).to_have_count(2)
        # A regeneration that fails leaves the answer that there was.
        server.engine.refusal = Unavailable("rank 1 died")
        await page.get_by_label("Regenerate").click()
        await expect(page.locator("#notice")).to_contain_text("Rank 1 died")
        assert await answer(page) == ANSWER
        server.engine.refusal = None
        await page.click("#notice button")
        await expect(page.locator(".version")).to_have_text("Version 2/2")
        await refused(page, "x" * 400, "max_model_len", "start a new chat")
        await page.evaluate("document.getElementById('extra').value = '{\"temperature\": -1}'")
        await refused(page, "Hi", "emperature is -1", "“temperature” in the settings")
        await page.evaluate("document.getElementById('extra').value = ''")
        server.engine.fail_after = 5
        await ask(page, "Hi")
        await expect(page.locator("#notice")).to_contain_text("died: signal 9")
        await expect(page.locator(".assistant .text").last).to_have_text(ANSWER[:5].strip())
        await expect(page.locator(".bar .end").last).to_contain_text("broken off")


async def test_a_dead_server_is_shown_and_found_again_without_a_reload(browser: Browser) -> None:
    async with opened(browser) as (_, page):
        await expect(page.locator("#state")).to_have_text("ready")
        await page.context.set_offline(True)
        await refused(page, "Are you there?", "The server does not answer")
        await expect(page.locator("#state")).to_have_text("not reached")
        await page.context.set_offline(False)
        await expect(page.locator("#state")).to_have_text("ready")
        await expect(page.locator("#notice")).to_be_hidden()
        await page.press("#prompt", "Enter")
        assert await answer(page) == ANSWER


async def test_a_missing_key_is_asked_for_and_forgotten_unless_it_shall_be_kept(browser: Browser) -> None:
    async with opened(browser, settings={"api_key": ("s3cret",)}) as (server, page):
        await page.fill("#key", "wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_contain_text("not known here")
        await page.fill("#key", "s3cret")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-dialog")).to_be_hidden()
        await expect(page.locator("#model")).to_have_text("tiny")
        assert await answer(page, "Hello") == ANSWER
        stored = "[localStorage, sessionStorage].map((place) => JSON.stringify(place).includes('s3cret'))"
        assert await page.evaluate(stored) == [False, True]
        await page.click("#settings-open")
        await page.click("#key-open")
        await page.fill("#key", "s3cret")
        await page.check("#key-remember")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-dialog")).to_be_hidden()
        assert await page.evaluate(stored) == [True, False]
        assert len(server.engine.asked) == 1


async def test_the_cluster_is_shown_while_it_is_looked_at(browser: Browser) -> None:
    asked = []

    async def cluster(route: Route) -> None:
        asked.append(route.request.url)
        await route.fulfill(body=json.dumps(CLUSTER), content_type="application/json")

    async with opened(browser) as (_, page):
        await page.route("**/cluster", cluster)
        await page.keyboard.press("Alt+c")
        await expect(page.locator("#ranks tr")).to_have_count(2)
        names = ("running", "generation", "hits", "experts", "kv-text", "uptime")
        shown = {name: await page.inner_text(f"#{name}") for name in names}
        assert shown == {
            "running": "12",
            "generation": "845",
            "hits": "63 %",
            "experts": "1.38 × mean",
            "kv-text": "40 % of the pages; 1,920 more tokens fit",
            "uptime": "1 h 6 min",
        }
        assert await page.evaluate("document.getElementById('kv').value") == 0.4
        assert "node 1" in await page.locator("#ranks tr").nth(1).inner_text()
        await page.keyboard.press("Escape")
        await expect(page.locator("#cluster")).to_be_hidden()
        count = len(asked)
        await page.wait_for_timeout(1700)
        assert len(asked) == count


async def test_the_keyboard_reaches_everything_and_colours_follow_the_system_until_chosen(browser: Browser) -> None:
    async with opened(browser, color_scheme="dark") as (_, page):
        await page.focus("#log")
        await page.keyboard.press("?")
        await expect(page.locator("#keys-dialog")).to_be_visible()
        assert await page.locator("#keys dt").count() > 8
        await page.keyboard.press("Escape")
        await page.fill("#prompt", "")
        await page.keyboard.type("why?")  # no shortcut while somebody writes
        await expect(page.locator("#keys-dialog")).to_be_hidden()
        await page.keyboard.press("Alt+s")
        await expect(page.locator("#settings")).to_be_visible()
        reached = set()
        for _ in range(45):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("document.activeElement.id"))
        wanted = {
            "new",
            "search",
            "theme",
            "list-close",
            "log",
            "prompt",
            "attach",
            "send",
            "settings-open",
            "cluster-open",
        }
        assert wanted | {"control-temperature", "system", "probabilities", "reset", "export"} <= reached
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(ground)
        await page.click("#theme")
        light = await page.evaluate(ground)
        assert dark != light
        await page.reload()
        assert await page.evaluate(ground) == light


async def test_a_narrow_screen_belongs_to_the_conversation(browser: Browser) -> None:
    engine = scripted(
        {
            "wide": "| a | b |\n|-|-|\n| "
            + "x" * 300
            + " | 2 |\n\n```\n"
            + "y" * 300
            + "\n```\n\n$$"
            + "z+" * 200
            + "z$$"
        }
    )
    async with opened(browser, engine, viewport={"width": 390, "height": 844}, has_touch=True) as (_, page):
        await answer(page, "wide")
        await expect(page.locator(".katex").first).to_be_visible()
        assert await page.evaluate("document.getElementById('log').clientHeight / innerHeight") > 0.8
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        assert await page.evaluate(
            "document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth"
        )
        await page.click("#list-open")
        await expect(page.locator("#list")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#list")).to_be_hidden()
        await page.click("#settings-open")
        await expect(page.locator("#system")).to_be_visible()


async def test_the_page_allows_no_foreign_content_and_only_its_own_files() -> None:
    async with gateway() as server:
        page = await server.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in page.text
        again = await server.http.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        types: dict[str, Callable[[str], Any]] = {
            "page.js": lambda kind: kind.startswith("text/javascript"),
            "lib/purify.es.mjs": lambda kind: kind.startswith("text/javascript"),
            "lib/fonts/KaTeX_Main-Regular.woff2": lambda kind: kind == "font/woff2",
        }
        for name, fits in types.items():
            file = await server.http.get(f"/page/{name}")
            assert file.status_code == 200
            assert fits(file.headers["content-type"])
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js", "/page/lib", "/page/"):
            assert (await server.http.get(path)).status_code == 404, path
