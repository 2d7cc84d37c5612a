"""The chat page in a real Chromium, on the width of a phone, before the real Triton server with the
echo model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.client.openai_proxy import get, serving
from tests.client.real_server import Server, assert_stops

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PHONE = {"width": 360, "height": 640}

pytestmark = pytest.mark.server
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs the package chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # A container's root has no sandbox, and the browser's own errands find no network there.
        options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=options)


@pytest.fixture
def page(browser: Browser, proxy: str) -> Iterator[Page]:
    """Fails the test for a request to another host and for an error in the console."""
    opened = browser.new_page(viewport=PHONE)  # type: ignore[arg-type]
    hosts: set[str] = set()
    errors: list[str] = []
    opened.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    opened.on("console", lambda said: said.type == "error" and errors.append(said.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"http://{proxy}/")
    yield opened
    opened.close()
    assert hosts == {proxy}
    assert errors == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_the_policy_lets_nothing_in(proxy: str) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/chat.css", "text/css"),
        ("/chat.js", "text/javascript"),
    ):
        status, headers, body = get(proxy, path)
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "://" not in body


@needs_browser
def test_an_answer_streams_and_is_counted(page: Page, tmp_path: Path) -> None:
    expect(page.get_by_role("heading")).to_have_text("Chat deepseek_v41")
    ask(page, "[cached]<b>世界</b> 🙂\nline")
    answer = page.locator("article.assistant")
    expect(answer.locator(".text")).to_have_text("<b>世界</b> 🙂\nline")
    counts = answer.locator(".counts")
    size = len("<b>世界</b> 🙂\nline".encode())
    expect(counts).to_contain_text(f"{size + 1} tokens in, 64 cached")
    expect(counts).to_contain_text(f"{size} out, 0 of them accepted drafts")
    expect(page.get_by_role("status")).to_have_text("The answer is complete.")
    expect(page.get_by_label("Your message")).to_be_focused()
    ask(page, "[pairs]abcd")
    expect(page.locator("article.assistant .counts").nth(1)).to_contain_text("2 of them accepted")
    # Nothing is wider than the phone.
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("article")).to_have_count(0)


@needs_browser
def test_thinking_is_folded_when_the_answer_begins(page: Page) -> None:
    page.get_by_label("Think first").check()
    ask(page, "2 < 3</think>So 3.")
    folded = page.locator("article.assistant details")
    expect(page.locator("article.assistant .text")).to_have_text("So 3.")
    assert folded.get_attribute("open") is None
    folded.locator("summary").click()
    expect(folded.locator("pre")).to_have_text("2 < 3")


@needs_browser
def test_stop_ends_the_answer_at_the_server(page: Page, server: Server) -> None:
    ask(page, "[slow]" + "abcdefghij" * 20)
    expect(page.locator("article.assistant .text")).to_contain_text("abc")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.locator("article.assistant .counts")).to_have_text("stopped")
    assert_stops(server)
    ask(page, "again")
    expect(page.locator("article.assistant .text").nth(1)).to_have_text("again")


@needs_browser
def test_errors_are_said_and_leave_the_question(page: Page) -> None:
    ask(page, "[error_after_three]abcd")
    expect(page.get_by_role("alert")).to_have_text("asked to fail after three tokens")
    expect(page.locator("article.assistant .text")).to_have_text("abc")


@needs_browser
def test_a_key_is_asked_for(browser: Browser, server: Server) -> None:
    with serving(server.grpc, keys=("secret",)) as proxy:
        page = browser.new_page()
        page.goto(f"http://{proxy}/")
        for key in ("wrong", "secret"):
            page.get_by_label("This server wants an API key").fill(key)
            page.get_by_role("button", name="Use it").click()
            if key == "wrong":
                expect(page.get_by_role("alert")).to_contain_text("expected a known API key")
        ask(page, "hello")
        expect(page.locator("article.assistant .text")).to_have_text("hello")
        page.close()
