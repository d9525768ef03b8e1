"""The page in a real browser: models, chat, kills, restarts, logs, access, looks."""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ui.browser import NARROW, Browser
from tests.e2e.ui.conftest import Daemons
from tests.running_daemon import RunningDaemon

# As in ui/timeline.js and ui/live.js.
EVENTS_SHOWN = 300
PAGE_EVENTS_MAX = 1200
DEMO = '#models tbody[data-model="demo"]'


@pytest.fixture
def page(browser: Browser, shared_daemon: RunningDaemon) -> RunningDaemon:
    """A daemon whose page is open and connected, with both models ready."""
    for model in ("demo", "second"):
        assert shared_daemon.ask("POST", "/models/load", {"model": model}).status == 200
    browser.open(shared_daemon.url)
    browser.wait_live()
    return shared_daemon


def pid_of(daemon: RunningDaemon) -> int:
    pid: int = daemon.status()["models"][0]["pid"]
    return pid


def confirm(browser: Browser) -> None:
    browser.wait(lambda: browser.one("#dialog").is_displayed(), "the dialog")
    browser.one("#dialog-ok").click()


def test_page_shows_models_and_asks_no_other_host(
    browser: Browser, page: RunningDaemon, tmp_path: Path
) -> None:
    browser.wait_text(f"{DEMO} .state", "ready")
    shown = browser.text(DEMO)
    assert f"#{page.status()['models'][0]['incarnation']} · pid {pid_of(page)}" in shown
    assert "scripted" in shown
    assert "second" in browser.text("#models")
    browser.wait_text("#recent-events", "engine.ready")
    browser.screenshot("overview", tmp_path)
    assert browser.hosts() == {f"127.0.0.1:{page.port}"}
    assert browser.console() == []


def test_two_turns_carry_their_context(browser: Browser, page: RunningDaemon) -> None:
    browser.say("echo one")
    browser.wait_answer("done", 1)
    browser.say("echo two")
    answer = browser.wait_answer("done", 2)
    assert "You said: echo one | echo two" in answer.text
    assert "7 (2 cached)" in answer.text
    assert "tokens/s" in answer.text
    assert browser.console() == []


def test_conversation_is_kept_in_the_browser_only(browser: Browser, page: RunningDaemon) -> None:
    browser.say("echo remembered")
    browser.wait_answer("done", 1)
    browser.driver.refresh()
    browser.wait_live()
    assert "You said: echo remembered" in browser.answer().text
    browser.press("New")
    assert not browser.all(".message")


def test_two_tabs_keep_each_others_conversations(browser: Browser, page: RunningDaemon) -> None:
    driver = browser.driver
    first = driver.current_window_handle
    browser.say("echo first tab")
    browser.wait_answer("done", 1)
    driver.switch_to.new_window("tab")
    try:
        browser.resize((1440, 900))
        driver.get(f"{page.url}/ui")
        browser.wait_live()
        browser.press("New")
        browser.say("echo second tab")
        browser.wait_answer("done", 1)
    finally:
        driver.close()
        driver.switch_to.window(first)
    titles = "[aria-label='Conversation']"
    browser.wait_text(f"select{titles}", "echo second tab")
    browser.say("echo more")
    browser.wait_answer("done", 2)
    driver.refresh()
    browser.wait_live()
    assert "echo second tab" in browser.text(f"select{titles}")
    assert "echo first tab | echo more" in browser.answer().text


def test_tool_call_is_shown_and_its_result_sent(browser: Browser, page: RunningDaemon) -> None:
    browser.say("tool please")
    answer = browser.wait_answer("done", 1)
    assert "Tool call: get_weather" in answer.text
    assert '"city": "Paris"' in answer.text
    browser.one(".call-answers textarea").send_keys("21 degrees")
    browser.press("Send results")
    assert "The tool said: 21 degrees" in browser.wait_answer("done", 2).text


def test_reasoning_is_folded(browser: Browser, page: RunningDaemon) -> None:
    browser.say("think hard")
    answer = browser.wait_answer("done", 1)
    assert "Reasoning · 6 words" in answer.text
    assert "Let me think" not in answer.text
    browser.one(".reasoning summary").click()
    browser.wait(lambda: "Let me think" in browser.answer().text, "the reasoning")


def test_markup_is_rendered_and_html_stays_text(browser: Browser, page: RunningDaemon) -> None:
    browser.say("markup")
    browser.wait_answer("done", 1)
    assert browser.text(".message.assistant strong") == "bold"
    assert browser.text(".code-block code") == 'print("<b>not bold</b>")'
    assert len(browser.all(".message.assistant ol > li")) == 2
    assert browser.one(".message.assistant a").get_attribute("rel") == (
        "noopener noreferrer nofollow"
    )
    assert "<script>window.pwned = true</script>" in browser.answer().text
    assert not browser.all(".message.assistant img, .message.assistant script")
    assert browser.script("return window.pwned === undefined")


def test_hostile_answer_is_shown_and_not_obeyed(
    browser: Browser, page: RunningDaemon, tmp_path: Path
) -> None:
    browser.say("hostile")
    answer = browser.wait_answer("done", 1)
    browser.screenshot("hostile", tmp_path)
    for shown in ("javascript:window.pwned=1", "<svg onload=", "<iframe src=", "{{constructor}}"):
        assert shown in answer.text
    targets: list[str] = browser.script(
        "return [...document.querySelectorAll('.message a')].map((a) => a.getAttribute('href'))"
    )
    assert all(target.startswith("https://") for target in targets)
    odd = ", ".join(f".message {tag}" for tag in ("img", "iframe", "svg", "style", "script"))
    assert not browser.all(odd)
    assert browser.script("return window.pwned === undefined")
    assert browser.one(".composer textarea").is_displayed()
    assert browser.hosts() == {f"127.0.0.1:{page.port}"}
    assert browser.console() == []


def test_megabyte_in_one_token_does_not_freeze_the_page(
    browser: Browser, page: RunningDaemon
) -> None:
    browser.say("huge")
    browser.wait_answer("done", 1)
    spent: float = browser.script(
        "const [message] = mlxIsolate.chat.store.current.messages.slice(-1);"
        "const view = mlxIsolate.chat.views.get(message);"
        "view.text.shownBlocks = []; view.text.replaceChildren();"
        "const began = performance.now(); view.update(); return performance.now() - began"
    )
    assert spent < 1000
    assert browser.script("return document.querySelector('.message.assistant').innerText.length")
    assert browser.script("return document.querySelectorAll('.message *').length") < 100
    browser.press("New conversation")


def test_policy_refuses_html_from_a_string(browser: Browser, page: RunningDaemon) -> None:
    refused = browser.script(
        "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }"
    )
    assert refused
    browser.console()


def test_stop_keeps_what_came(browser: Browser, page: RunningDaemon) -> None:
    browser.say("count 2000")
    browser.wait_text(".message.assistant > .text", "5 6 7")
    browser.press("Stop")
    answer = browser.wait_answer("stopped", 1)
    assert "1 2 3" in answer.text
    assert "stopped" in answer.text
    browser.wait(lambda: page.status()["models"][0]["active"] == 0, "the engine is idle again")


def test_kill_in_mid_answer_keeps_the_text_and_continue_goes_on(
    browser: Browser, page: RunningDaemon, tmp_path: Path
) -> None:
    before = pid_of(page)
    browser.say("count 400")
    browser.wait_text(".message.assistant > .text", "20 21 22")
    browser.press("Drill: kill demo")
    confirm(browser)
    answer = browser.wait_answer("failed", 1)
    assert "engine_died" in answer.text
    partial = browser.text(".message.assistant > .text")
    assert partial.startswith("1 2 3 4")
    browser.screenshot("killed", tmp_path)
    browser.press("Continue")
    browser.wait_answer("done", 1)
    numbers = [int(word) for word in browser.text(".message.assistant > .text").split()]
    assert numbers == list(range(1, 401))
    after = pid_of(page)
    assert after != before
    browser.wait_text(f"{DEMO}", f"pid {after}")
    browser.wait_text(f"{DEMO} .exit", "SIGKILL")
    browser.wait_text("#recent-events", "engine.lost")
    assert browser.console() == []


def test_failed_turn_can_be_tried_again(browser: Browser, page: RunningDaemon) -> None:
    browser.say("crash")
    answer = browser.wait_answer("failed", 1)
    assert "engine_died" in answer.text
    browser.press("Edit this message")
    browser.one(".composer textarea").clear()
    browser.say("echo better")
    assert "You said: echo better" in browser.wait_answer("done", 1).text


def test_page_survives_a_restart_of_the_supervisor(browser: Browser, start_daemon: Daemons) -> None:
    first = start_daemon()
    first.wait_state("ready")
    browser.open(first.url)
    browser.wait_live()
    browser.say("echo before")
    browser.wait_answer("done", 1)
    old_pid = first.process.pid
    first.__exit__(None, None, None)
    browser.wait_text("#connection", "reconnecting")
    second = start_daemon(port=first.port)
    browser.wait_text("#connection", "live")
    browser.wait_text("#supervisor-line", f"pid {second.process.pid}")
    assert second.process.pid != old_pid
    browser.wait_text("#recent-events", "page.restarted")
    second.wait_state("ready")
    browser.say("echo after")
    assert "echo before | echo after" in browser.wait_answer("done", 2).text
    browser.console()


def test_page_catches_up_on_events_it_missed(browser: Browser, page: RunningDaemon) -> None:
    browser.script("mlxIsolate.live.abort.abort(); mlxIsolate.live.wake = () => {}")
    page.ask("POST", "/models/unload", {"model": "demo"})
    browser.wait_text("#connection", "live")
    browser.wait_text("#recent-events", "stopping → stopped")
    kinds: list[Any] = browser.script("return mlxIsolate.live.events.map((e) => e.id)")
    assert len(kinds) == len(set(kinds))


def test_pages_left_behind_give_their_connections_back(
    browser: Browser, page: RunningDaemon
) -> None:
    # A browser has six connections to a server; pages in its back/forward cache held them all.
    for _ in range(8):
        browser.driver.get(f"{page.url}/ui#logs")
        browser.wait_text("#log", "ready")
        browser.driver.get("about:blank")
    browser.driver.get(f"{page.url}/ui")
    browser.wait_live()


def test_page_that_slept_connects_again(browser: Browser, page: RunningDaemon) -> None:
    # After a sleep the stream looks open and nothing comes; the last byte is an hour old.
    browser.script(
        "window.before = mlxIsolate.live.abort; mlxIsolate.live.heard = Date.now() - 3600000"
    )
    browser.wait(lambda: browser.script("return mlxIsolate.live.abort !== before"), "a new stream")
    browser.wait_text("#connection", "live")
    page.chat("demo", messages=[{"role": "user", "content": "echo awake"}])
    browser.show("events")
    browser.wait_text("#timeline", "request.ended")


def test_hidden_page_lets_its_stream_go_and_catches_up(
    browser: Browser, page: RunningDaemon
) -> None:
    browser.script("mlxIsolate.live.suspend()")
    browser.wait_text("#connection", "paused")
    answer = page.chat("demo", messages=[{"role": "user", "content": "echo unseen"}])
    browser.script("mlxIsolate.live.resume()")
    browser.wait_text("#connection", "live")
    wanted = answer.headers["x-request-id"]
    browser.wait(
        lambda: wanted in browser.script("return mlxIsolate.live.events.map((e) => e.request_id)"),
        "the event of the request",
    )


def test_page_stays_small_under_a_long_load(browser: Browser, page: RunningDaemon) -> None:
    def nodes() -> int:
        count: int = browser.script("return document.querySelectorAll('*').length")
        return count

    browser.show("events")
    message = {"messages": [{"role": "user", "content": "echo x"}], "max_tokens": 1}

    def send(count: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(page.chat, "demo", **message) for _ in range(count)]:
                done.result()

    send(EVENTS_SHOWN + 50)
    browser.wait_text("#events-count", f"newest {EVENTS_SHOWN} of")
    before = nodes()
    send(PAGE_EVENTS_MAX)
    newest = page.chat("demo", **message).headers["x-request-id"]
    browser.wait(
        lambda: newest == browser.script("return mlxIsolate.live.events.at(-1).request_id"),
        "the newest event",
    )
    assert browser.script("return mlxIsolate.live.events.length") <= PAGE_EVENTS_MAX
    assert nodes() < before * 1.2
    assert browser.console() == []


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
    browser.script(
        "const status = structuredClone(mlxIsolate.live.status);"
        "Object.assign(status.models[0], {state: 'stopped', waits_for: 'until second is idle'});"
        "mlxIsolate.live.dispatchEvent(new CustomEvent('status', {detail: status}))"
    )
    assert browser.text(f"{DEMO} .state") == "stopped · waiting"
    assert browser.text(f"{DEMO} .exit") == "It waits until second is idle."


def test_times_follow_the_servers_clock(browser: Browser, page: RunningDaemon) -> None:
    # A browser whose clock is an hour behind, then a server's that was set back.
    browser.script("const now = Date.now; Date.now = () => now() - 3600000")
    browser.wait(lambda: browser.script("return mlxIsolate.live.skew > 3590"), "the skew")
    browser.wait(lambda: browser.all("#chart-memory .series"), "the chart")
    browser.wait(lambda: " h " not in browser.text(f"{DEMO} .sub"), "times of minutes")
    browser.script("mlxIsolate.live.newestSample += 7200")
    browser.wait(
        lambda: browser.script(
            "const newest = mlxIsolate.live.newestSample;"
            "return newest > 0 && newest < mlxIsolate.live.now() + 60"
        ),
        "samples again",
    )


def test_events_that_never_pause_are_shown(browser: Browser, page: RunningDaemon) -> None:
    shown: int = browser.driver.execute_async_script(
        """
        const done = arguments[0], live = new mlxIsolate.live.constructor();
        let id = 0, batches = 0;
        live.addEventListener("events", () => (batches += 1));
        const body = new ReadableStream({
          async pull(controller) {
            await new Promise((resolve) => setTimeout(resolve, 5));
            let text = "";
            for (let i = 0; i < 10; i += 1)
              text += `id: x-${(id += 1)}\ndata: {"kind":"request.ended","id":"x-${id}"}\n\n`;
            controller.enqueue(new TextEncoder().encode(text));
          },
        });
        live.read(new Response(body));
        setTimeout(() => done(live.events.length && batches), 1000);
        """
    )
    assert 5 <= shown <= 25


def test_conversation_left_in_mid_answer_keeps_what_came(
    browser: Browser, page: RunningDaemon
) -> None:
    browser.say("count 2000")
    browser.wait_text(".message.assistant > .text", "20 21 22")
    browser.press("New conversation")
    browser.wait(lambda: not browser.all(".message"), "an empty conversation")
    titles = browser.one("select[aria-label='Conversation']")
    titles.find_elements("tag name", "option")[-1].click()
    answer = browser.wait_answer("stopped", 1)
    assert "1 2 3" in answer.text and "20 21 22" in answer.text


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


def test_log_tail_follows_and_filters(browser: Browser, page: RunningDaemon) -> None:
    browser.show("logs")
    browser.wait_text("#log", "made-up model demo loads")
    browser.one("#logs-filter [name=text]").send_keys("second")
    browser.wait(lambda: "demo loads" not in browser.text("#log"), "the filter holds")
    assert "made-up model second loads" in browser.text("#log")
    browser.one("#logs-filter [name=text]").clear()
    number = page.ask("POST", "/models/reload", {"model": "demo"}).json()["incarnation"]
    browser.wait_text("#log", f"incarnation={number}")


def test_log_stays_at_its_end_until_it_is_scrolled_up(
    browser: Browser, page: RunningDaemon
) -> None:
    def below() -> float:
        left: float = browser.script(
            "const p = document.getElementById('log');"
            "return p.scrollHeight - p.scrollTop - p.clientHeight"
        )
        return left

    def ask() -> str:
        answer = page.chat("demo", messages=[{"role": "user", "content": "echo x"}])
        return answer.headers["x-request-id"]

    newest = [ask() for _ in range(40)][-1]
    browser.show("logs")
    browser.wait_text("#log", newest)
    assert browser.script("const p = document.getElementById('log'); return p.scrollHeight > 800")
    browser.wait(lambda: below() < 2, "the end of the log")
    browser.wait_text("#log", ask())
    browser.wait(lambda: below() < 2, "the end again")
    browser.script("document.getElementById('log').scrollTop = 50")
    follow = browser.one("#logs-filter [name=follow]")
    browser.wait(lambda: not follow.is_selected(), "no following")
    browser.wait_text("#log", ask())
    assert browser.script("return document.getElementById('log').scrollTop") == 50
    follow.click()
    browser.wait(lambda: below() < 2, "the end by the box")


def test_charts_show_what_was_generated(browser: Browser, page: RunningDaemon) -> None:
    browser.say("count 300")
    browser.wait_answer("done", 1)
    now = "#chart-tokens svg"

    def label() -> str:
        return browser.one(now).get_attribute("aria-label") or ""

    browser.wait(lambda: re.search(r"highest [1-9]", label()), "a rate in the chart")
    assert browser.all("#chart-tokens .series")


def test_events_are_filtered_by_kind_and_text(browser: Browser, page: RunningDaemon) -> None:
    browser.say("echo x")
    browser.wait_answer("done", 1)
    browser.show("events")
    browser.wait_text("#timeline", "request.ended")
    browser.one("#events-filter [name=kind]").send_keys("lifecycle")
    browser.wait(lambda: "request.ended" not in browser.text("#timeline"), "lifecycle only")
    assert "engine.ready" in browser.text("#timeline")


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
