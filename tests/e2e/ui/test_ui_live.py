"""What the page shows as it happens: events, log, charts; after sleeps, restarts, under load."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.ui.browser import DEMO, Browser
from tests.e2e.ui.conftest import Daemons
from tests.running_daemon import RunningDaemon

# As in ui/timeline.js and ui/live.js.
EVENTS_SHOWN = 300
PAGE_EVENTS_MAX = 1200


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
