"""A real headless Chromium on the page: opens it, waits for what it shows, looks over its shoulder."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.waiting import wait_for

WAIT_S = 15.0
# axe looks at every element; on a busy machine that takes its time.
SCRIPT_S = 90.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver on the PATH"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WIDE = (1440, 900)
NARROW = (390, 844)
# What the page shows of the model `demo`.
DEMO = '#models tbody[data-model="demo"]'
# Where screenshots go; a person who wants to see them names a folder.
ARTIFACTS = "MLX_ISOLATE_ARTIFACTS"


class Browser:
    """One Chromium for many tests; `open` begins afresh."""

    def __init__(self) -> None:
        os.environ["SE_OFFLINE"] = "true"  # selenium's own downloader stays silent
        self._profile = tempfile.mkdtemp(prefix="mi-chromium")
        options = Options()
        options.binary_location = CHROMIUM or ""
        for flag in (*FLAGS, f"--user-data-dir={self._profile}", "--window-size=1440,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        options.add_experimental_option("perfLoggingPrefs", {"enablePage": False})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(SCRIPT_S)

    def quit(self) -> None:
        self.driver.quit()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(
        self, url: str, *, view: str = "", size: tuple[int, int] = WIDE, dark: bool = False
    ) -> None:
        """Load the page with nothing in storage, in a window of `size`."""
        # A document of the same origin that keeps nothing itself.
        self.driver.get(f"{url}/ui/icon.svg")
        self.script("localStorage.clear(); sessionStorage.clear()")
        self.resize(size)
        self.set_dark(dark)
        self.console()
        self.hosts()
        self.driver.get(f"{url}/ui{f'#{view}' if view else ''}")

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def set_dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        # Without a graphics card each frame of an animation is drawn by the cores of the tests.
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._command("Emulation.setEmulatedMedia", features=[scheme, still])

    def _command(self, name: str, **parameters: Any) -> None:
        self.driver.execute_cdp_cmd(name, parameters)

    def show(self, view: str) -> None:
        self.script("location.hash = arguments[0]", view)
        self.wait(lambda: self.one(f"#view-{view}").is_displayed(), f"the view {view}")

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Text of the first match as shown, "" if there is none."""
        found = self.all(selector)
        return found[0].text if found else ""

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = WAIT_S) -> Any:
        """Wait for something that the page shows."""

        def holds() -> Any:
            try:
                return condition()
            except StaleElementReferenceException:
                return None

        try:
            return wait_for(holds, deadline_s, what)
        except AssertionError as error:
            error.add_note(f"the page shows:\n{self.one('body').text}\n{self.console()}")
            raise

    def wait_text(self, selector: str, part: str, deadline_s: float = WAIT_S) -> None:
        self.wait(lambda: part in self.text(selector), f"{part!r} in {selector}", deadline_s)

    def wait_live(self) -> None:
        """The page is connected and shows models."""
        self.wait_text("#connection", "live")
        self.wait(lambda: self.all("#models tbody"), "models")

    def say(self, text: str) -> None:
        """Type a message and send it with Enter."""
        self.one(".composer textarea").send_keys(text, Keys.ENTER)

    def answer(self, number: int = -1) -> WebElement:
        """The number-th answer of the model."""
        return self.all(".message.assistant")[number]

    def wait_answer(self, state: str, count: int | None = None) -> WebElement:
        """Wait until the last (`count`-th) answer is in `state`: done, stopped or failed."""

        def found() -> WebElement | None:
            answers = self.all(".message.assistant")
            if not answers or (count is not None and len(answers) != count):
                return None
            is_so = answers[-1].get_attribute("data-state") == state
            return answers[-1] if is_so else None

        element = self.wait(found, f"an answer that is {state}")
        assert isinstance(element, WebElement)
        return element

    def press(self, name: str, within: str = "body") -> None:
        """Click the button with this text or label."""

        def found() -> WebElement | None:
            for button in self.all(f"{within} button"):
                label = button.get_attribute("aria-label") or ""
                if name in (button.text, label) and button.is_displayed() and button.is_enabled():
                    return button
            return None

        self.wait(found, f"a button {name}").click()

    def confirm(self) -> None:
        """Say yes to the dialog that comes."""
        self.wait(lambda: self.one("#dialog").is_displayed(), "the dialog")
        self.one("#dialog-ok").click()

    def console(self) -> list[str]:
        """Console messages since the last call, those of a lost connection left out."""
        return [
            entry["message"]
            for entry in self._log("browser")
            if "ERR_CONNECTION_REFUSED" not in entry["message"]
            and "ERR_INCOMPLETE_CHUNKED_ENCODING" not in entry["message"]
            and "ERR_CONNECTION_RESET" not in entry["message"]
        ]

    def hosts(self) -> set[str]:
        """Hosts that were asked for anything since the last call."""
        found: set[str] = set()
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                parts = urlsplit(message["params"]["request"]["url"])
                if parts.scheme not in {"about", "data"}:
                    found.add(parts.netloc)
        return found

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries

    def screenshot(self, name: str, folder: Path) -> Path:
        """Save what is shown; under the named artifacts folder, else under the test's own."""
        place = Path(os.environ.get(ARTIFACTS) or folder)
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path
