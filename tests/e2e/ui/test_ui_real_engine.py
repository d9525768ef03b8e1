"""The page over real engines: an answer that a kill cut off is gone on with."""

from pathlib import Path
from typing import Any

from tests.e2e.ui.browser import Browser
from tests.running_daemon import REAL, RunningDaemon
from tests.waiting import wait_for

MODEL = "slow"
# More than come before a kill that follows upon the first of them.
TOKENS = 600
MORE_TOKENS = 60
QUESTION = "tell me something"


def content(browser: Browser) -> str:
    """The model's last answer as it came, before any rendering."""
    text: str = browser.script("return mlxIsolate.chat.store.current.messages.at(-1).content")
    return text


def continuation(daemon: RunningDaemon, part: str) -> str:
    """How the engine goes on from `part`."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": part}]
    answer: Any = daemon.chat(
        MODEL, messages=messages, max_tokens=MORE_TOKENS, temperature=0, continue_final_message=True
    ).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_answer_cut_by_a_kill_is_continued_by_the_next_engine(
    browser: Browser, daemon: RunningDaemon
) -> None:
    index = [model["id"] for model in daemon.status()["models"]].index(MODEL)
    browser.open(daemon.url)
    browser.wait_live()
    browser.script(
        "const s = document.querySelector('.chat-engine select'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('change'));"
        "Object.assign(mlxIsolate.chat.store.settings, {max_tokens: arguments[1], temperature: 0})",
        MODEL,
        TOKENS,
    )
    browser.say(QUESTION)
    browser.wait(lambda: len(content(browser)) > 20, "the beginning of an answer")
    before = daemon.status()["models"][index]["pid"]
    assert daemon.ask("POST", "/drill/kill", {"model": MODEL}).status == 200
    browser.wait_answer("failed", 1)
    part = content(browser).rstrip()
    # The answer's end is told before the engine is reaped, so for a moment it still shows as ready.
    wait_for(lambda: daemon.status()["models"][index]["pid"] != before, 10.0, "the engine is gone")
    daemon.wait_state("ready", index, 60.0)
    browser.script("mlxIsolate.chat.store.settings.max_tokens = arguments[0]", MORE_TOKENS)
    browser.press("Continue")
    browser.wait_answer("done", 1)
    assert content(browser) == part + continuation(daemon, part)


def test_flush_button_writes_the_cache_and_says_so(
    browser: Browser, full_model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    flags = ("--served-model-name", "kept", "--ssd-cache-dir", str(cache))
    with RunningDaemon(tmp_path / "home", str(full_model), *flags, program=REAL) as daemon:
        daemon.wait_state("ready", 0, 120.0)
        assert daemon.chat("kept", max_tokens=4).status == 200
        browser.open(daemon.url)
        browser.wait_live()
        browser.press("Flush cache kept")
        browser.wait_text("#toasts", "kept: cache is on disk")
        assert list(cache.rglob("*.safetensors"))
