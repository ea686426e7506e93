"""The reference of the HTTP API at /docs."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, expect

from support.gateway import gateway
from support.page import require_chromium

require_chromium()
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_reference_shows_the_endpoints_and_loads_nothing_from_elsewhere(browser: Browser) -> None:
    async with gateway(api_key=("secret",)) as server:
        page = await browser.new_page()
        asked: list[str] = []
        page.on("response", lambda response: asked.append(response.url))
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(f"{server.http_address}/docs")
        await page.fill("#key", "secret")
        await page.click("#ask button")
        await expect(page.get_by_text("/v1/chat/completions").first).to_be_visible(timeout=20_000)
        await expect(page.locator("#ask")).to_be_hidden()
        assert all(url.startswith((server.http_address, "data:")) for url in asked)
        assert problems == []
        await page.close()
