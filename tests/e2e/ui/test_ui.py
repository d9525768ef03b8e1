"""The page in a real browser: models and their buttons, requests, access."""

import re
from pathlib import Path

from tests.e2e.ui.browser import DEMO, Browser
from tests.e2e.ui.conftest import Daemons
from tests.running_daemon import RunningDaemon


def test_page_shows_models_and_asks_no_other_host(
    browser: Browser, page: RunningDaemon, tmp_path: Path
) -> None:
    browser.wait_text(f"{DEMO} .state", "ready")
    shown = browser.text(DEMO)
    model = page.status()["models"][0]
    assert f"#{model['incarnation']} · pid {model['pid']}" in shown
    assert "scripted" in shown
    assert "second" in browser.text("#models")
    browser.wait_text("#recent-events", "engine.ready")
    browser.screenshot("overview", tmp_path)
    assert browser.hosts() == {f"127.0.0.1:{page.port}"}
    assert browser.console() == []


def test_policy_refuses_html_from_a_string(browser: Browser, page: RunningDaemon) -> None:
    refused = browser.script(
        "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }"
    )
    assert refused
    browser.console()


def test_model_says_what_it_waits_for_and_the_head_what_is_reserved(
    browser: Browser, page: RunningDaemon
) -> None:
    browser.wait(
        lambda: re.search(
            r"engines: \S+ \S+ of \S+ \S+ reserved", browser.text("#supervisor-line")
        ),
        "what is reserved",
    )
    assert re.search(r"MB of \S+ [MG]B", browser.text(DEMO))
    # No real status comes in between.
    browser.script(
        "mlxIsolate.live.refresh = () => {};"
        "const status = structuredClone(mlxIsolate.live.status);"
        "Object.assign(status.models[0], {state: 'stopped', waits_for: 'until second is idle'});"
        "mlxIsolate.live.dispatchEvent(new CustomEvent('status', {detail: status}))"
    )
    assert browser.text(f"{DEMO} .state") == "stopped · waiting"
    assert browser.text(f"{DEMO} .exit") == "It waits until second is idle."


def test_buttons_unload_and_load(browser: Browser, page: RunningDaemon) -> None:
    browser.press("Unload demo")
    browser.wait_text(f"{DEMO} .state", "stopped")
    before = page.status()["models"][0]
    assert before["pid"] is None
    browser.press("Load demo")
    browser.wait_text(f"{DEMO} .state", "ready")
    assert page.status()["models"][0]["incarnation"] == before["incarnation"] + 1


def test_buttons_reload_and_reset(browser: Browser, page: RunningDaemon) -> None:
    before = page.status()["models"][0]
    browser.press("Reload demo")
    browser.wait_text("#toasts", "demo: reloaded")
    browser.wait_text(DEMO, f"#{before['incarnation'] + 1} · pid ")
    page.ask("POST", "/drill/kill", {"model": "demo"})
    browser.wait_text(DEMO, f"#{before['incarnation'] + 2} · pid ")
    browser.wait_text(f"{DEMO} .state", "ready")
    browser.press("Reset demo")
    browser.wait_text("#toasts", "demo: failures forgotten")


def test_running_request_is_listed_and_cancelled(browser: Browser, page: RunningDaemon) -> None:
    browser.show("requests")
    browser.say("count 2000")
    browser.wait_text("#requests tbody", "streaming")
    browser.press("Cancel", "#requests")
    answer = browser.wait_answer("failed", 1)
    assert "cancelled by the operator" in answer.text
    browser.wait_text("#ended tbody", "cancelled")


def test_key_is_asked_for_and_kept_in_the_tab(
    browser: Browser, start_daemon: Daemons, tmp_path: Path
) -> None:
    daemon = start_daemon("--api-key", "sesame")
    browser.open(daemon.url)
    browser.wait_text("#connection", "API key needed")
    field = browser.wait(lambda: browser.one("#dialog-input").is_displayed(), "the key dialog")
    assert field
    browser.screenshot("key", tmp_path)
    browser.one("#dialog-input").send_keys("wrong\n")
    browser.wait_text("#dialog-error", "refused")
    browser.one("#dialog-input").send_keys("sesame\n")
    browser.wait_live()
    browser.say("echo with key")
    browser.wait_answer("done", 1)
    assert browser.script("return Object.values(localStorage).join().includes('sesame')") is False
    browser.console()
