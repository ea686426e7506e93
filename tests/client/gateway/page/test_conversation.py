"""The page's conversations in a real browser: sent, kept, branched, stopped, continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from support.fake_engine import ANSWER
from support.gateway import eventually, fake_engine
from support.page import answer, ask, opened, require_chromium, scripted

require_chromium()
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def of_item(page: Page, title: str, label: str) -> None:
    """Clicks a button of the list that shows once the pointer is there."""
    await page.locator("#conversations li", has_text=title).hover()
    await page.get_by_label(label).click()


async def test_an_answer_streams_and_the_conversation_outlives_a_reload(browser: Browser) -> None:
    async with opened(browser, fake_engine(step_s=0.002)) as (server, page):
        await page.fill("#prompt", "Hello there")
        await page.keyboard.press("Enter")
        assert await answer(page) == ANSWER
        assert server.engine.last.params.logprobs is None, "probabilities cost, and nobody asked for them"
        await answer(page, "And then?")
        assert ANSWER.encode() in bytes(t for t in server.engine.last.prompt if t < 256), "it goes on from there"
        await expect(page.locator("#spoken")).to_contain_text("quick brown fox")
        await page.reload()
        assert await answer(page) == ANSWER
        await expect(page.locator(".message.user")).to_have_count(2)
        await expect(page.locator("#title")).to_have_text("Hello there")


async def test_conversations_are_listed_searched_renamed_and_deleted(browser: Browser) -> None:
    async with opened(browser, scripted({"cat": "Cats purr.", "dog": "Dogs bark."})) as (_, page):
        await answer(page, "About a cat")
        await page.keyboard.press("Alt+n")
        await expect(page.locator("#prompt")).to_be_focused()
        await answer(page, "About a dog")
        names = page.locator("#conversations .go")
        await expect(names).to_have_text(["About a dog", "About a cat"])
        await page.keyboard.press("Alt+k")
        await page.keyboard.type("purr")
        await expect(names).to_have_text(["About a cat"])
        await names.click()
        await expect(page.locator(".message.assistant .text")).to_have_text("Cats purr.")
        await page.fill("#search", "")
        await expect(names).to_have_count(2)
        await of_item(page, "About a cat", "Rename “About a cat”")
        await page.get_by_label("New name").fill("<b>Felines</b>")
        await page.keyboard.press("Enter")
        await expect(names).to_have_text(["About a dog", "<b>Felines</b>"])
        await of_item(page, "<b>Felines</b>", "Delete “<b>Felines</b>”")
        await expect(names).to_have_text(["About a dog"])
        await expect(page.locator("#title")).to_have_text("New chat")
        await page.click("#toast button")
        await expect(names).to_have_text(["About a dog", "<b>Felines</b>"])
        await expect(page.locator(".message.assistant .text")).to_have_text("Cats purr.")


async def test_conversations_are_exported_and_imported_again(browser: Browser, tmp_path: Path) -> None:
    async with opened(browser) as (_, page):
        await answer(page, "Keep this")
        await page.click("#settings-open")
        async with page.expect_download() as download:
            await page.click("#export")
        file = tmp_path / "all.json"
        await (await download.value).save_as(file)
        kept = json.loads(file.read_text())
        (conversation,) = kept["conversations"]
        assert [node["content"] for node in conversation["nodes"].values()] == ["Keep this", ANSWER]
        await of_item(page, "Keep this", "Delete “Keep this”")
        await expect(page.locator("#conversations .go")).to_have_count(0)
        # What is in a file was written by anybody.
        conversation["nodes"]["7"] = {"id": "7", "parent": "9", "role": "system", "content": {"a": 1}}
        kept["conversations"] += [
            {"id": "../x", "nodes": {}},
            None,
            {"id": "loop", "nodes": {"0": {"id": "0", "parent": "0"}}},
        ]
        file.write_text(json.dumps(kept))
        await page.set_input_files("#import-input", file)
        await expect(page.locator("#toast")).to_have_text("1 conversation was imported.")
        await page.click("#conversations .go")
        assert await answer(page) == ANSWER
        file.write_text("[]")
        await page.set_input_files("#import-input", file)
        await expect(page.locator("#toast")).to_contain_text("no conversations of this page")


async def test_regenerating_and_editing_keep_the_earlier_versions(browser: Browser) -> None:
    engine = scripted({"one": "First.", "two": "Second."})
    async with opened(browser, engine) as (_, page):
        await answer(page, "Say one")
        await page.keyboard.press("Alt+r")
        version = page.locator(".assistant .version")
        await expect(version).to_have_text("Version 2/2")
        await page.get_by_label("Earlier version").click()
        await expect(version).to_have_text("Version 1/2")
        await page.press("#prompt", "ArrowUp")  # the last message, to edit
        await page.get_by_label("Edited message").fill("Say two")
        await page.keyboard.press("Enter")
        await expect(page.locator(".assistant .text")).to_have_text("Second.")
        await expect(page.locator(".user .version")).to_have_text("Version 2/2")
        await page.get_by_label("Earlier version").click()
        await expect(page.locator(".assistant .text")).to_have_text("First.")
        assert [asked.prompt.count(ord("w")) for asked in engine.asked.values()] == [
            engine.last.prompt.count(ord("w")) - 1,
            engine.last.prompt.count(ord("w")) - 1,
            engine.last.prompt.count(ord("w")),
        ], "the branch was asked without the other one's messages"


async def test_stopping_stops_the_request_and_the_answer_can_be_continued(browser: Browser) -> None:
    async with opened(browser, fake_engine(endless=True, step_s=0.01)) as (server, page):
        for how in ("button", "escape"):
            await ask(page)
            await expect(page.locator(".message.assistant .text").last).to_contain_text("quick")
            await expect(page.locator("#conversations li.running")).to_have_count(1)
            await (page.click("#stop") if how == "button" else page.keyboard.press("Escape"))
            await eventually(lambda: server.engine.last.stopped)
            await expect(page.locator(".bar .end").last).to_contain_text("stopped")
            await expect(page.locator("#prompt")).to_be_focused()
        begun = await answer(page)
        await page.get_by_label("Continue").last.click()
        await eventually(lambda: len(server.engine.asked) == 3)
        assert bytes(t for t in server.engine.last.prompt if t < 256).decode().rstrip().endswith(begun)
        await page.wait_for_function(
            "n => [...document.querySelectorAll('.assistant .text')].at(-1).innerText.length > n", arg=len(begun)
        )
        await page.click("#stop")
        assert (await answer(page)).startswith(begun)


async def test_an_answer_goes_on_while_another_conversation_is_shown(browser: Browser) -> None:
    async with opened(browser, fake_engine(endless=True, step_s=0.005)) as (_, page):
        await ask(page, "Hello")
        await expect(page.locator(".assistant .text")).to_contain_text("quick")
        await page.keyboard.press("Alt+n")
        await expect(page.locator("#send")).to_be_visible()
        await page.click("#conversations li.running .go")
        await expect(page.locator("#stop")).to_be_visible()
        await expect(page.locator(".assistant .text")).to_contain_text("lazy dog. Ünïcödé 🦊!The")
        await page.keyboard.press("Escape")
        await expect(page.locator("#send")).to_be_visible()


async def test_the_system_prompt_and_the_controls_are_sent_and_wrong_ones_are_named(browser: Browser) -> None:
    async with opened(browser) as (server, page):
        await page.click("#settings-open")
        for name, value in {"temperature": "0.35", "top_k": "7", "seed": "11", "max_tokens": "5"}.items():
            await page.fill(f"#control-{name}", value)
        await page.fill("#system", "Be brief.")
        await page.click("#settings summary")
        await page.fill("#stop-strings", "one\ntwo")
        await page.fill("#extra", '{"min_tokens": 2}')
        assert await answer(page, "Hello") == ANSWER[:5]
        asked = server.engine.last
        params = asked.params
        assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.35, 7, 11, 5)
        assert (params.stop, params.min_tokens, params.logprobs) == (("one", "two"), 2, None)
        assert b"Be brief." in bytes(t for t in asked.prompt if t < 256)
        await page.reload()
        await page.click("#settings-open")
        assert [await page.input_value(f"#{name}") for name in ("control-top_k", "system")] == ["7", "Be brief."]
        assert await page.get_attribute("#control-temperature", "placeholder"), "the default is shown"
        await expect(page.locator("#control-top_p")).to_have_attribute("max", "1")  # the server's own limit
        for field, value, named in (("#control-top_p", "3", "Top-p"), ("#extra", "{", "JSON")):
            await page.fill(field, value) if field != "#extra" else await page.evaluate(
                f"document.getElementById('extra').value = '{value}'"
            )
            await ask(page, "Kept?")
            await expect(page.locator("#notice")).to_contain_text(named)
            assert await page.input_value("#prompt") == "Kept?"
            await page.evaluate("document.getElementById('control-top_p').value = ''")
        assert len(server.engine.asked) == 1


async def test_text_files_are_sent_as_fenced_blocks_and_others_are_refused(browser: Browser) -> None:
    async with opened(browser, scripted({"what": "Seen."})) as (server, page):
        files = [("notes.py", b"a = '```'\n"), ("big.txt", b"x" * 300_000), ("photo.png", b"\x89PNG\xff\0")]
        payloads = [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files]
        await page.set_input_files("#file-input", payloads)  # type: ignore[arg-type]
        notice = page.locator("#notice")
        await expect(notice).to_contain_text("big.txt has 293 KiB; a file may have at most 256 KiB")
        await expect(notice).to_contain_text("photo.png is no text")
        await expect(page.locator("#files li")).to_have_count(1)
        await answer(page, "what is it?")
        prompt = bytes(t for t in server.engine.last.prompt if t < 256).decode()
        assert "notes.py:\n````py\na = '```'\n````\n\nwhat is it?" in prompt
        await expect(page.locator("#files")).to_be_hidden()
        await expect(page.locator(".user .file summary")).to_have_text("notes.py")
