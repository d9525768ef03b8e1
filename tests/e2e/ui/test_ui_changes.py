"""The page while what it looks at changes under it: a key, a model, requests of the same name."""

import http.client
import json

from tests.e2e.ui.browser import Browser
from tests.e2e.ui.conftest import Daemons

CHOSEN = "return document.querySelector('#logs-filter select[name=model]').value"
CHOOSE = """
const select = document.querySelector('#logs-filter select[name=model]');
select.value = arguments[0];
select.dispatchEvent(new Event('change'));
"""
# A status without the second model, as after a reload of the configuration that removed it.
REMOVE = """
const { live } = mlxIsolate;
const detail = { ...live.status, models: live.status.models.slice(0, 1) };
live.refresh = () => {};
live.dispatchEvent(new CustomEvent('status', { detail }));
"""


def test_key_that_is_right_no_longer_is_asked_for_once(
    browser: Browser, start_daemon: Daemons
) -> None:
    daemon = start_daemon("--api-key", "sesame")
    browser.open(daemon.url)
    browser.wait(lambda: browser.one("#dialog-input").is_displayed(), "the key dialog")
    browser.one("#dialog-input").send_keys("sesame\n")
    browser.wait_live()
    # The open stream of events goes on, whatever becomes of the key that it was opened with.
    browser.script("sessionStorage.setItem('mlx-isolate.key', 'of yesterday')")
    browser.wait(lambda: browser.one("#dialog-input").is_displayed(), "the key dialog")
    browser.wait_text("#connection", "API key needed")
    browser.press("Cancel")
    # Nothing is asked in this state, so nothing brings the dialog back.
    assert browser.text("#connection") == "API key needed"
    assert not browser.one("#dialog").is_displayed()
    browser.one("#key-button").click()
    browser.one("#dialog-input").send_keys("sesame\n")
    browser.wait_live()
    browser.console()


def test_log_of_a_model_that_is_removed_becomes_the_whole_log(
    browser: Browser, start_daemon: Daemons
) -> None:
    daemon = start_daemon()
    daemon.wait_state("ready", 0)
    daemon.wait_state("ready", 1)
    browser.open(daemon.url, view="logs")
    browser.wait_text("#log", "daemon.started")
    browser.script(CHOOSE, "second")
    browser.wait(lambda: "daemon.started" not in browser.text("#log"), "the log of one model")
    browser.wait_text("#log", "second#1 |")
    browser.script(REMOVE)
    assert browser.script(CHOSEN) == ""
    browser.wait_text("#log", "daemon.started")
    assert browser.console() == []


def test_requests_of_one_id_have_a_row_each(browser: Browser, start_daemon: Daemons) -> None:
    daemon = start_daemon()
    daemon.wait_state("ready", 0)
    browser.open(daemon.url, view="requests")
    clients: list[http.client.HTTPConnection] = []
    for _ in range(2):
        client = daemon.connect()
        message = {"role": "user", "content": "count 100000"}
        body = json.dumps({"messages": [message], "stream": True, "max_tokens": 100_000})
        headers = {"Content-Type": "application/json", "x-request-id": "twin"}
        client.request("POST", "/v1/chat/completions", body, headers)
        clients.append(client)
    rows = "#requests tr[data-request='twin']"
    browser.wait(lambda: len(browser.all(rows)) == 2, "two rows")
    browser.press("Cancel", rows)
    browser.wait(lambda: not browser.all(rows), "both are cancelled")
    for client in clients:
        client.close()
    assert browser.console() == []
