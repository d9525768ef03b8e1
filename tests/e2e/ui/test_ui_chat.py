"""The page's chat in a real browser: turns, tools, markup, stops, kills, what is kept."""

from pathlib import Path

from tests.e2e.ui.browser import DEMO, Browser
from tests.running_daemon import RunningDaemon


def pid_of(daemon: RunningDaemon) -> int:
    pid: int = daemon.status()["models"][0]["pid"]
    return pid


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
    browser.confirm()
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
