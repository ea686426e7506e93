"""axe-core's rules on every part of the page: names, roles, focus, contrast, order of headings."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from allspan.protos.api.errors import QueueFull
from support.page import answer, ask, opened, require_chromium, scripted

require_chromium()
pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = """## A heading

| a | b |
|---|---|
| 1 | [2](https://example.com) |

- one `code` $x^2$
- [ ] two

> said

```python
def f(x): return "x"  # why
```
"""
SCRIPTS = {
    "show": f"<think>Hm.</think>{TEXT}",
    "full": QueueFull("7 wait, at most 7"),
}


async def faults(page: Page, axe: str) -> list[str]:
    """Returns a line for each element that breaks a rule."""
    await page.evaluate(f"window.axe || (() => {{ {axe} }})()")
    found = await page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found["violations"] for node in rule["nodes"]]


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
async def test_no_rule_of_axe_is_broken(browser: Browser, node_folder: Path, scheme: str, width: int) -> None:
    axe = (node_folder / "node_modules" / "axe-core" / "axe.min.js").read_text()
    looks = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    async with opened(browser, scripted(SCRIPTS), {"reasoning_parser": "generic"}, **looks) as (_, page):
        await expect(page.locator("#state")).to_have_text("ready")
        assert await faults(page, axe) == []
        await answer(page, "show")
        await page.get_by_label("Regenerate").click()
        await answer(page)
        await page.click(".thinking summary")
        await ask(page, "full")
        await expect(page.locator("#notice")).to_be_visible()
        assert await faults(page, axe) == []
        for key in ("Alt+s", "Alt+c", "Alt+l"):
            await page.keyboard.press(key)
            if key == "Alt+s":
                await page.click("#settings summary")
            assert await faults(page, axe) == [], key
            await page.keyboard.press(key)
        await page.focus("#log")
        for key, dialog in (("?", "#keys-dialog"), ("", "#key-dialog")):
            await (
                page.keyboard.press(key) if key else page.evaluate("document.getElementById('key-dialog').showModal()")
            )
            await expect(page.locator(dialog)).to_be_visible()
            assert await faults(page, axe) == [], dialog
            await page.keyboard.press("Escape")
