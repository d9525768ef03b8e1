"""How the page looks and is used: narrow, dark, by keyboard, by those who cannot see it."""

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.ui.browser import NARROW, Browser
from tests.e2e.ui.conftest import Daemons
from tests.running_daemon import RunningDaemon


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_narrow_screen_fits(
    browser: Browser, page: RunningDaemon, tmp_path: Path, dark: bool
) -> None:
    browser.open(page.url, size=NARROW, dark=dark)
    browser.wait_live()
    for view in ("overview", "requests", "events", "logs", "chat"):
        browser.show(view)
        width: int = browser.script("return document.documentElement.scrollWidth")
        assert width <= NARROW[0], view
        browser.screenshot(f"narrow-{view}-{'dark' if dark else 'light'}", tmp_path)
    browser.say("count 300")
    browser.wait_answer("done", 1)
    browser.screenshot(f"narrow-answer-{'dark' if dark else 'light'}", tmp_path)
    assert browser.script("return document.documentElement.scrollWidth") <= NARROW[0]
    assert browser.console() == []


def test_theme_follows_the_system_and_the_button(browser: Browser, page: RunningDaemon) -> None:
    def ground() -> str:
        found: str = browser.script("return getComputedStyle(document.body).backgroundColor")
        return found

    light = ground()
    browser.set_dark(True)
    browser.wait(lambda: ground() != light, "the dark ground")
    browser.press("Theme: auto")
    browser.wait(lambda: ground() == light, "light by the button")
    browser.set_dark(False)


def axe_script() -> str:
    found = importlib.util.find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("needs axe-core-python (the dev extra)")
    return (Path(found.origin).parent / "axe.min.js").read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_serious_finding_of_axe(
    browser: Browser, start_daemon: Daemons, dark: bool, tmp_path: Path
) -> None:
    page = start_daemon()
    page.wait_state("ready", 0)
    page.wait_state("ready", 1)
    browser.open(page.url, dark=dark)
    browser.wait_live()
    browser.say("think hard")
    browser.wait_answer("done", 1)
    browser.say("tool")
    browser.wait_answer("done", 2)
    page.ask("POST", "/models/unload", {"model": "second"})
    browser.script(axe_script())
    for view in ("overview", "requests", "events", "logs"):
        browser.show(view)
        found = browser.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then((r) => done(r.violations))"
        )
        browser.screenshot(f"axe-{view}-{'dark' if dark else 'light'}", tmp_path)
        serious = [
            (each["id"], each["impact"], [node["html"][:150] for node in each["nodes"]])
            for each in found
            if each["impact"] in {"serious", "critical"}
        ]
        assert not serious, view


def test_page_works_by_keyboard(browser: Browser, page: RunningDaemon) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    seen: list[str] = []
    for _ in range(20):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        seen.append(
            browser.script(
                "const e = document.activeElement;"
                "return e.getAttribute('aria-label') || e.textContent.trim()"
            )
        )
    assert seen[0] == "Skip to content"
    assert "Requests" in seen
    assert "Unload demo" in seen
