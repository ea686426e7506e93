"""The page at / in a real browser: one Chromium for all tests of a process, a fresh profile for each."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from support.chat_tokenizer import EOS, VOCAB_SIZE
from support.fake_engine import FakeEngine
from support.gateway import Gateway, gateway
from support.scripted_engine import Script, ScriptedEngine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def require_chromium() -> None:
    """Skips a module where there is no browser and none is required."""
    if CHROMIUM is None and not os.environ.get("ALLSPAN_REQUIRE_TOOLS"):
        pytest.skip("no chromium here: the page is not tested in a browser", allow_module_level=True)


def scripted(scripts: Mapping[str, Script | str]) -> ScriptedEngine:
    """An engine that answers by what the prompt holds; a text comes in pieces of a few characters."""
    split = {
        mark: [script[i : i + 7] for i in range(0, len(script), 7)] if isinstance(script, str) else script
        for mark, script in scripts.items()
    }
    return ScriptedEngine(tokens=(), eos=EOS, vocab_size=VOCAB_SIZE, max_model_len=8192, scripts=split)


@asynccontextmanager
async def opened(
    browser: Browser, engine: FakeEngine | None = None, settings: Mapping[str, Any] | None = None, **context: Any
) -> AsyncIterator[tuple[Gateway, Page]]:
    """The page of a gateway. Afterwards: no script has failed, and no other server was asked."""
    failures: list[str] = []
    asked: list[str] = []
    async with gateway(engine, **(settings or {})) as server:
        profile = await browser.new_context(**({"viewport": {"width": 1200, "height": 800}} | context))
        page = await profile.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda line: failures.append(line.text) if "Content Security" in line.text else None)
        page.on("request", lambda request: asked.append(request.url))
        try:
            await page.goto(f"{server.http_address}/")
            yield server, page
        finally:
            await profile.close()
        assert failures == []
        assert {url for url in asked if not url.startswith((server.http_address, "blob:"))} == set()


async def ask(page: Page, text: str = "Hello") -> None:
    """Sends a message."""
    await page.fill("#prompt", text)
    await page.click("#send")


async def answer(page: Page, text: str = "") -> str:
    """The last answer's text, once it has ended; `text` is asked before."""
    ended = page.locator(".message.assistant .bar")
    if text:
        count = await ended.count()
        await ask(page, text)
        await ended.nth(count).wait_for()
    last = page.locator(".message.assistant").last
    await last.locator(".bar").wait_for()
    return await last.locator(".body > .text").inner_text()
