"""The page in a headless Chromium: a chat streams, the panel moves, nothing of a model's text becomes markup.

Needs playwright and a Chromium, on the PATH (Debian: chromium) or in OCTAVO_TEST_CHROMIUM. Pictures go to
OCTAVO_TEST_SCREENSHOTS, where that is set.
"""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from octavo.config.engine import PoolingConfig
from octavo.config.server_args import ServerArgs
from octavo.engine.stats import IterationStats
from octavo.metrics import StatCollector
from octavo.server.app import build_app
from octavo.server.launch import bound_socket, make_server
from octavo.types.stats import SchedulerStats
from tests.server.fake_engine import FakeEngine, make_config, say

playwright = pytest.importorskip("playwright.async_api", reason="needs playwright, which drives a browser")
expect = playwright.expect

CHROMIUM = os.environ.get("OCTAVO_TEST_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("needs a Chromium (Debian: chromium, or OCTAVO_TEST_CHROMIUM)", allow_module_level=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all
PATIENCE = 30.0
HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>\n\n"
    "[click](javascript:alert(1)) **bold <b>x</b>** `<i>code</i>`\n\n```html\n<script>document.title='broken'</script>\n```\n"
)


class CountedEngine(FakeEngine):
    """The scripted engine, telling a stat collector of each token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats = StatCollector("tiny", 4096)
        self.stats.record(SchedulerStats(), None)

    async def generate(self, *args, **kwargs):
        first = True
        try:
            async for output in super().generate(*args, **kwargs):
                scheduler = SchedulerStats(len(self.running), 0, 0.25, prefix_cache_queries=10, prefix_cache_hits=4)
                seconds = {"time_to_first_token": [0.05]} if first else {"inter_token_latency": [0.02]}
                self.stats.record(scheduler, IterationStats(9 * first, num_generation_tokens=1, **seconds))
                first = False
                yield output
        finally:
            self.stats.record(SchedulerStats(), None)


def engine_saying(text: str, **fields) -> CountedEngine:
    return CountedEngine(script=say(text), config=make_config(max_model_len=4096), **fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator:
    async with playwright.async_playwright() as driver:
        launched = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        await launched.close()


@asynccontextmanager
async def page_of(browser, engine: CountedEngine, **options) -> AsyncIterator[tuple]:
    """The page of a server of this process, open in a browser, and what its console said. It must not have erred."""
    context = {name: options.pop(name) for name in ("color_scheme", "viewport") if name in options}
    args = ServerArgs(port=0, disable_uvicorn_access_log=True, **options)
    with bound_socket(args) as listener:
        listening = asyncio.Event()
        server = make_server(build_app(engine, args, engine.stats), args, listening.set)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait_for(listening.wait(), PATIENCE)
        try:
            page = await browser.new_page(**context)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda said: said.type == "error" and problems.append(said.text))
            await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}{args.root_path}/")
            yield page, problems
            await page.close()
        finally:
            server.should_exit = server.force_exit = True
            await task


async def ask(page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")


async def test_chat_streams_and_the_panel_moves(browser, tmp_path):
    engine = engine_saying("One **two** three four five.\n\n- six\n- seven", hold_after=12)
    async with page_of(browser, engine) as (page, problems):
        await expect(page.locator("#state")).to_have_text("ready")
        await expect(page.locator("#model-list")).to_contain_text("alias")
        await page.get_by_label("Temperature").fill("0.5")
        await page.get_by_label("Max tokens").fill("500")
        await page.get_by_label("Seed").fill("7")
        await page.get_by_label("System prompt").fill("Be brief.")
        await ask(page, "Count <b>up</b>.")
        await asyncio.wait_for(engine.reached.wait(), PATIENCE)
        answer = page.locator("article.assistant")
        await expect(answer.locator("strong")).to_have_text("two")  # half of it is there while the engine waits
        await expect(answer).not_to_contain_text("seven")
        await expect(page.locator("#m-running")).to_have_text("1")
        await expect(page.locator("#m-kv")).to_have_text("25 %")
        await expect(page.locator("#m-prefix")).to_have_text("40 %")
        picture = await page.screenshot(path=tmp_path / "page.png")
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
        engine.release.set()
        await expect(answer.locator("li")).to_have_text(["six", "seven"])
        await expect(answer.locator("footer")).to_contain_text("tokens/s")
        await expect(page.locator("#m-running")).to_have_text("0")
        await expect(page.locator("#m-ttft")).to_have_text("50 ms")
        await expect(page.locator("#spark-line")).to_have_attribute("points", re.compile(r"\d"))
        sent = engine.params[0]
        assert (sent.temperature, sent.max_tokens, sent.seed) == (0.5, 500, 7)
        prompt = engine.tokenizer.decode(engine.prompts[0], skip_special_tokens=False)
        assert "Be brief." in prompt and "Count <b>up</b>." in prompt

        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.get_by_role("button", name="Copy").click()
        await expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert await page.evaluate("navigator.clipboard.readText()") == "One **two** three four five.\n\n- six\n- seven"

        await page.get_by_role("button", name="Regenerate").click()
        await expect(answer.locator("footer")).to_contain_text("tokens/s")
        await expect(answer).to_have_count(1)
        assert engine.prompts[1] == engine.prompts[0]
        assert problems == []


async def test_stop_frees_the_engine_and_keeps_what_was_said(browser):
    engine = engine_saying("abc def ghi jkl", hold_after=4)
    async with page_of(browser, engine) as (page, problems):
        await ask(page, "Go")
        await asyncio.wait_for(engine.reached.wait(), PATIENCE)
        await expect(page.locator("article.assistant .markdown")).to_contain_text("abc")
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator("article.assistant footer")).to_contain_text("stopped")
        await asyncio.wait_for(engine.idle.wait(), PATIENCE)
        assert len(engine.aborted) == 1
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        assert problems == []


async def test_a_models_text_is_never_markup(browser):
    async with page_of(browser, engine_saying(HOSTILE)) as (page, problems):
        await ask(page, HOSTILE)
        await expect(page.locator("article.assistant footer")).to_contain_text("tokens/s")
        assert await page.locator("article :is(img, script, i, b, a)").count() == 0
        await expect(page.locator("article.assistant .code code")).to_have_text(
            "<script>document.title='broken'</script>"
        )
        await expect(page.locator("article.assistant strong")).to_have_text("bold <b>x</b>")
        assert await page.title() == "Octavo"
        # The policy holds against the page's own script as well.
        assert (
            await page.evaluate(
                "() => { try { document.body.innerHTML = '<b>x'; return 'set' } catch (e) { return e.name } }"
            )
            == "TypeError"
        )
        assert len(problems) == 1 and "TrustedHTML" in problems[0]


async def test_reasoning_and_tool_calls_are_shown_and_results_sent(browser):
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    engine = engine_saying(f"<think>Hm, weather.</think>Let me look.{call}")
    async with page_of(browser, engine, tool_call_parser="hermes", reasoning_parser="deepseek_r1") as (page, problems):
        tool = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
        await page.get_by_label("Tools").fill(tool)
        await ask(page, "Weather?")
        await expect(page.locator("article.assistant .tool-call")).to_contain_text("get_weather")
        await expect(page.locator(".tool-call code")).to_have_text('{"city": "Oslo"}')
        thoughts = page.locator(".thoughts")
        await expect(thoughts).to_be_hidden()
        await page.get_by_text("Reasoning").click()
        await expect(thoughts).to_have_text("Hm, weather.")
        await expect(page.get_by_placeholder("Result of get_weather")).to_be_visible()
        engine.script = say("Sunny.")
        await page.get_by_label("Message").fill("sun")
        await page.keyboard.press("Enter")
        await expect(page.locator("article.tool")).to_contain_text("sun")
        await expect(page.locator("article.assistant").last).to_contain_text("Sunny.")
        assert problems == []


async def test_drafts_and_adapters_are_shown_where_there_are_any(browser):
    numbers = {"draft": 40, "accepted": 30}
    samples = [f'vllm:spec_decode_num_{kind}_tokens_total{{engine="0"}} {n}.0' for kind, n in numbers.items()]
    text = "\n".join(["# HELP x y", 'vllm:num_requests_running{engine="0",model_name="a} 9"} 2.0', *samples, ""])
    base = {"id": "base", "parent": None, "max_model_len": 8192}
    models = {"data": [base, {**base, "id": "poet", "parent": "base"}]}
    async with page_of(browser, engine_saying("ok")) as (page, problems):
        await expect(page.locator("#drafts")).to_be_hidden()
        await page.route("**/metrics", lambda route: route.fulfill(body=text))
        await page.route("**/v1/models", lambda route: route.fulfill(json=models))
        await page.reload()
        await expect(page.locator("#m-drafts")).to_have_text("75 %")
        await expect(page.locator("#m-running")).to_have_text("2")
        await expect(page.locator("#model-list li")).to_have_text(
            [re.compile("8,192 tokens"), re.compile("adapter of base")]
        )
        await expect(page.locator("#model option")).to_have_text(["base", "poet"])
        assert problems == []


async def test_a_pooling_model_has_the_panel_alone(browser):
    engine = engine_saying("ok")
    pooling = PoolingConfig(["embed", "score"], False, False, "mean", "all", "normalize", 8)
    engine.config = replace(engine.config, pooling=pooling)
    async with page_of(browser, engine) as (page, problems):
        await expect(page.locator("#empty")).to_contain_text("embed, score")
        await expect(page.get_by_label("Message")).to_be_disabled()
        await expect(page.locator("#m-running")).to_have_text("0")
        assert problems == []


async def test_a_key_is_asked_for_and_an_error_is_told(browser):
    async with page_of(browser, engine_saying("ok"), api_key="secret", root_path="/under/proxy") as (page, _):
        for key, wrong in (("guess", False), ("secret", True)):
            await expect(page.get_by_role("alert")).to_be_visible(visible=wrong)
            await page.get_by_label("Key", exact=True).fill(key)
            await page.keyboard.press("Enter")
        await expect(page.locator("#model-list")).to_contain_text("tiny")
        await ask(page, "Hi")
        await expect(page.locator("article.assistant .markdown")).to_have_text("ok")
        await page.get_by_label("Top p").fill("3")
        await ask(page, "Hi")
        await expect(page.locator("article.assistant .error")).to_contain_text("top_p")
        assert await page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_it_fits_every_screen(browser, tmp_path, color_scheme, width, height):
    text = (
        "A paragraph with `code`.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\n"
        + "x = 1  # long\n" * 2
        + "y" * 300
        + "\n```"
    )
    viewport = {"width": width, "height": height}
    async with page_of(browser, engine_saying(text), color_scheme=color_scheme, viewport=viewport) as (page, problems):
        await ask(page, "Show me")
        await expect(page.locator("article.assistant footer")).to_contain_text("tokens/s")
        await expect(page.locator("td")).to_have_text(["1", "2"])
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
        assert dark == (color_scheme == "dark")
        folder = Path(os.environ.get("OCTAVO_TEST_SCREENSHOTS", tmp_path))
        await page.screenshot(path=folder / f"{color_scheme}-{width}.png")
        side = page.get_by_role("button", name="Panel")
        if width < 800:  # the panel takes the place of the chat, and gives it back
            await side.click()
            await expect(page.get_by_label("Message")).to_be_hidden()
            await page.screenshot(path=folder / f"{color_scheme}-{width}-panel.png")
        await side.click()
        await expect(page.get_by_label("Message")).to_be_visible()
        await expect(page.locator("#aside")).to_be_hidden()
        assert problems == []
