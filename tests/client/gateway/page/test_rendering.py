"""What a model writes, as the page shows it: Markdown, code, formulas, thinking, calls; never as HTML of its own."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import Browser, expect

from support.fake_engine import ANSWER
from support.gateway import fake_engine
from support.page import answer, ask, opened, require_chromium, scripted

require_chromium()
pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = r"""# Title

A *paragraph* with `code`, $a^2 + b^2$ and prices of $5 or $10
on two lines.

| left | right |
|------|------:|
| a    | 1     |

- one
  - two

      indented

```python
def f(x):
    return "x"  # why
```

1. first

   ```js
   let a = 1;
   ```
2. [link][there]

$$
\frac{1}{2}
$$

> quoted \(x\) and \[y\]

[there]: https://example.com/
"""
HOSTILE = """<img src=x onerror="document.title='gone'"><script>document.title='gone'</script>
![a picture](http://127.0.0.1:9/x.png) [run](javascript:document.title='gone') <a href="javascript:1" onclick=1>x</a>
<style>body{display:none}</style> <iframe srcdoc="<script>top.document.title='gone'</script>"></iframe>

<div onmouseover=1>**bold**</div> H<sub>2</sub>O&amp;<br>end `<b>` <form action="http://127.0.0.1:9"><input name=q>

$\\href{javascript:alert(1)}{x}$ $\\includegraphics{http://127.0.0.1:9/y.png}$ $\\def\\a{\\a\\a}\\a$

```"><img
<img src=x onerror="document.title='gone'">
```
"""


async def test_markdown_code_tables_and_formulas_are_set(browser: Browser) -> None:
    async with opened(browser, scripted({"show": TEXT}), permissions=["clipboard-read", "clipboard-write"]) as (
        _,
        page,
    ):
        await answer(page, "show me")
        shown = page.locator(".assistant .markdown")
        await expect(shown.locator("h3")).to_have_text("Title")
        await expect(shown.locator("td").nth(1)).to_have_css("text-align", "right")
        await expect(shown.locator(".code-block .hljs-keyword").first).to_have_text("def")
        await expect(shown.locator("li .code-block .hljs-keyword")).to_have_text("let")
        await expect(shown.locator(".katex")).to_have_count(4)
        await expect(shown.locator(".formula.display")).to_have_count(2)
        await expect(shown.get_by_text("prices of $5 or $10")).to_be_visible()
        await expect(shown.get_by_role("link", name="link")).to_have_attribute("href", "https://example.com/")
        await expect(shown.get_by_role("link", name="link")).to_have_attribute("rel", "noopener noreferrer nofollow")
        await shown.get_by_label("Copy the code").first.click()
        assert await page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "x"  # why'
        fonts = await page.evaluate("[...document.fonts].filter((font) => font.status === 'loaded').length")
        assert fonts > 0, "formulas are set with the fonts of this server"


async def test_a_text_that_comes_in_pieces_looks_like_one_that_came_whole(browser: Browser) -> None:
    async with opened(browser) as (_, page):
        whole, grown, kept = await page.evaluate(
            """async (text) => {
                 const { MarkdownView } = await import("/page/markdown/view.js");
                 const [whole, grown] = [new MarkdownView(), new MarkdownView()];
                 document.getElementById("messages").append(whole.element, grown.element);
                 whole.show(text, true);
                 const frame = () => new Promise(requestAnimationFrame);
                 grown.show(text.slice(0, 40), false);
                 const first = grown.element.firstChild;
                 for (let end = 41; end < text.length; end += 7) {
                   await frame();
                   grown.show(text.slice(0, end), false);
                 }
                 const kept = grown.element.firstChild === first;
                 grown.show(text, true);
                 const settled = () => new Promise((then) => setTimeout(then, 300));
                 await settled();
                 return [whole.element.innerHTML, grown.element.innerHTML, kept];
               }""",
            TEXT,
        )
        assert grown == whole
        assert kept, "a block that is complete was set again"
        nested = await page.evaluate(
            """async (text) => {
                 const { MarkdownView } = await import("/page/markdown/view.js");
                 const view = new MarkdownView();
                 view.show(text, true);
                 return view.element.textContent;
               }""",
            "> " * 20_000,
        )
        assert nested == "> " * 20_000, "marks that no parser can take are shown as they are"


async def test_output_runs_nothing_loads_nothing_and_leads_nowhere(browser: Browser) -> None:
    async with opened(browser, scripted({"show": HOSTILE})) as (_, page):
        await answer(page, "show")
        shown = page.locator(".assistant .markdown")
        await expect(
            shown.locator("img, script, style, iframe, form, input, [onclick], [onerror], [style*=url]")
        ).to_have_count(0)
        hrefs = await shown.locator("a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
        assert hrefs[:2] == ["http://127.0.0.1:9/x.png", None], "a picture is a link, and a script is none"
        assert all(href is None or href.startswith("http://") for href in hrefs)
        assert "<img src=x onerror=" in await shown.inner_text()
        await expect(shown.locator("sub")).to_have_text("2")
        assert "gone" not in await page.title()
        await page.reload()
        await answer(page)
        assert "gone" not in await page.title()


async def test_thinking_is_folded_and_tool_calls_are_shown(browser: Browser) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    engine = scripted({"think": "<think>One moment.</think>Done.", "weather": call})
    async with opened(browser, engine, {"reasoning_parser": "generic"}) as (_, page):
        assert await answer(page, "think") == "Done."
        await expect(page.locator(".thinking .text")).to_be_hidden()
        await page.click(".thinking summary")
        await expect(page.locator(".thinking .text")).to_have_text("One moment.")
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
        await page.evaluate("(text) => (document.getElementById('extra').value = text)", json.dumps({"tools": [tool]}))
        await answer(page, "weather")
        await expect(page.locator(".call")).to_contain_text("get_weather")
        await expect(page.locator(".call pre")).to_contain_text('"city": "Paris"')


async def test_probabilities_are_told_once_they_are_switched_on(browser: Browser) -> None:
    async with opened(browser, fake_engine(step_s=0.001)) as (server, page):
        await expect(page.locator("#legend")).to_be_hidden()
        await page.click("#settings-open")
        await page.check("#probabilities")
        await expect(page.locator("#legend")).to_contain_text("under 5 %")
        assert await answer(page, "Hello") == ANSWER
        assert server.engine.last.params.logprobs == 5
        await page.locator(".log .token").nth(4).hover()
        tip = page.locator("#tip")
        assert await tip.locator("tr.chosen").inner_text() == "q\t60.7 %"
        assert await tip.locator("tr").count() == 5
        await page.mouse.move(1, 1)
        await expect(tip).to_be_hidden()
        # The same by keyboard, said to a screen reader.
        await page.focus("#log")
        for _ in range(2):
            await page.keyboard.press("ArrowRight")
        await expect(page.locator(".token.current")).to_have_text("h")
        assert "60.7 %" in await page.inner_text("#spoken")
        await page.uncheck("#probabilities")
        await expect(page.locator(".log .token")).to_have_count(0)


async def test_a_fast_answer_is_drawn_once_a_frame(browser: Browser) -> None:
    words = "".join(f"word{i} " + ("\n\n" if i % 20 == 0 else "") for i in range(600))
    engine = fake_engine(tokens=tuple(words.encode()), max_model_len=16384)
    async with opened(browser, engine) as (_, page):
        await page.evaluate(
            """() => {
                 window.changes = 0;
                 const counter = new MutationObserver(() => window.changes++);
                 counter.observe(document.getElementById("messages"), { childList: true, subtree: true });
               }"""
        )
        await ask(page, "Hello")
        shown = await answer(page)
        assert shown.split() == words.split()
        assert await page.evaluate("window.changes") < len(words) / 2, "drawn for every token"
