"""The page in a real browser: it watches the engine, chats, and asks nobody else.

    python tests/page/test_page.py PROGRAM [FOLDER FOR SCREENSHOTS]

PROGRAM is the deltapool binary; it serves its embedded model on a free port.
"""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PATIENCE_MS = 120_000
KEY = "a key of the test"


@contextmanager
def serving(program, *args):
    command = [program, "serve", "--port", "0", "--device-memory", "64MiB", *args]
    # What it says goes to a file: a pipe that nobody reads would fill up and stop it.
    with tempfile.NamedTemporaryFile("r") as said:
        with open(said.name, "w") as out:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=out)
        try:
            address = None
            while address is None:
                if server.poll() is not None:
                    sys.exit(f"the server did not start:\n{said.read()}")
                said.seek(0)
                address = re.search(r"(http://[\w.:\[\]]+)\s", said.read())
            yield address.group(1), server
        finally:
            server.kill()
            server.wait()


@contextmanager
def opened(browser, address, **options):
    """A page, whose errors and requests to others fail the test when it is closed.

    It is under its own policy: nothing can be waited for with a script.
    """
    faults = []
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    expect.set_options(timeout=PATIENCE_MS)
    host = urlsplit(address).netloc
    # Of these the page says itself: a key that is wanted, and a server that has gone.
    known = ["401", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    is_known = lambda text: any(word in text for word in known)
    is_error = lambda message: message.type == "error" and not is_known(message.text)
    page.on("console", lambda message: is_error(message) and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    is_foreign = lambda request: urlsplit(request.url).netloc != host
    page.on("request", lambda request: is_foreign(request) and faults.append(request.url))
    page.goto(address)
    yield page
    context.close()
    assert not faults, faults


def until_ready(page):
    expect(page).to_have_title(re.compile("ready"))


def send(page, message, tokens):
    page.fill("#most", str(tokens))
    page.fill("#prompt", message)
    page.press("#prompt", "Enter")


def used(page):
    return int(page.get_attribute("[data-pool='device/block']", "data-used"))


def fits(page):
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{wide} pixels stick out"


def shoot(page, folder, name):
    picture = page.screenshot(full_page=True)
    assert len(picture) > 10_000, "a screenshot of nothing"
    if folder:
        (Path(folder) / f"{name}.png").write_bytes(picture)


def a_chat_shows_text_and_its_memory(browser, address, folder):
    with opened(browser, address, viewport={"width": 1440, "height": 900}) as page:
        until_ready(page)
        assert used(page) == 0
        pools = "[data-pool='device/block']"
        page.evaluate(
            """(pools) => {
              window.mostUsed = 0;
              new MutationObserver(() => {
                const used = Number(document.querySelector(pools).dataset.used);
                window.mostUsed = Math.max(window.mostUsed, used);
              }).observe(document.querySelector(pools), { attributes: true });
            }""",
            pools,
        )
        # An answer may be over between two looks, so it is asked for until it was seen at work.
        for turn in range(100):
            send(page, "Once upon a time there was a little girl named Lily.", 400)
            expect(page.locator(".turn.assistant .cost")).to_have_count(turn + 1)
            expect(page.locator("#send")).to_be_visible()
            if page.evaluate("window.mostUsed") > 0:
                break
        assert page.evaluate("window.mostUsed") > 0, "no memory was seen in use"
        assert len(page.inner_text(".turn.assistant .text >> nth=0")) > 100
        expect(page.locator(".turn.assistant .cost").first).to_contain_text("tokens")
        assert page.locator(".turn.bad").count() == 0
        expect(page.locator(pools)).to_have_attribute("data-used", "0")
        assert int(page.get_attribute(pools, "data-cached")) > 0, "states are kept for reuse"
        expect(page.locator("#stepnote")).to_contain_text("steps so far")
        expect(page.locator("#itl-marks")).to_contain_text("ms")
        page.focus("#canvas")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#tip")).to_contain_text("step ")
        page.keyboard.press("Escape")
        fits(page)
        shoot(page, folder, "light")


def an_answer_can_be_stopped(browser, address, folder):
    dark = {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}}
    with opened(browser, address, **dark) as page:
        until_ready(page)
        send(page, "Tell me of a dog.", 100_000)
        expect(page.locator(".turn.assistant .text")).to_have_text(re.compile(r"\w.{20}", re.S))
        page.press("#prompt", "Escape")
        expect(page.locator(".cost")).to_have_count(1)
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator("#lane-decode")).to_have_text("0")
        shoot(page, folder, "dark")


def it_works_on_a_telephone(browser, address, folder):
    small = {"viewport": {"width": 375, "height": 740}, "device_scale_factor": 2}
    with opened(browser, address, **small) as page:
        until_ready(page)
        # Nothing stands for what was there at first.
        send(page, "Once upon a time", "")
        expect(page.locator(".turn.assistant .cost")).to_have_count(1)
        fits(page)
        shoot(page, folder, "small")


def a_key_is_asked_for_and_kept_nowhere(browser, address):
    with opened(browser, address) as page:
        for given in ["another", KEY]:
            page.wait_for_selector("#ask[open]")
            expect(page.locator("#unknown")).to_be_visible(visible=given == KEY)
            page.fill("#key", given)
            page.press("#key", "Enter")
        until_ready(page)
        send(page, "Once upon a time", 8)
        expect(page.locator(".turn.assistant .cost")).to_have_count(1)
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in page.evaluate(kept)
        page.reload()
        page.wait_for_selector("#ask[open]")


def main(program, folder=None):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        tests = [a_chat_shows_text_and_its_memory, an_answer_can_be_stopped, it_works_on_a_telephone]
        with serving(program) as (address, _):
            for test in tests:
                test(browser, address, folder)
                print("ok", test.__name__, flush=True)
        with serving(program, "--api-key", KEY) as (address, _):
            a_key_is_asked_for_and_kept_nowhere(browser, address)
            print("ok a_key_is_asked_for_and_kept_nowhere", flush=True)
        browser.close()
    print("4 passed, 0 failed")


main(*sys.argv[1:])
