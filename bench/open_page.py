"""The daemon's page, open in a real browser beside a bench; nothing where there is no browser."""

from typing import Protocol


class Page(Protocol):
    """The page, or nothing in its place."""

    def look(self) -> tuple[int, int]:
        """Bytes of the page's heap, number of its nodes."""
        ...

    def close(self) -> None:
        """Leave the page."""
        ...


class NoPage:
    """Where there is no browser."""

    def look(self) -> tuple[int, int]:
        """Nothing is shown."""
        return 0, 0

    def close(self) -> None:
        """Nothing to leave."""


class OpenPage:
    """The real page in a headless Chromium, on its overview."""

    def __init__(self, url: str) -> None:
        from tests.e2e.ui.browser import Browser

        self._browser = Browser()
        self._browser.open(url)
        self._browser.wait_live()

    def look(self) -> tuple[int, int]:
        """Of the page's own thread; the log that the driver gathers is thrown away."""
        self._browser.hosts()
        self._browser.console()
        heap, nodes = self._browser.script(
            "return [performance.memory.usedJSHeapSize, document.querySelectorAll('*').length]"
        )
        assert self._browser.text("#connection") in {"live", "reconnecting"}
        return int(heap), int(nodes)

    def close(self) -> None:
        """End the browser."""
        self._browser.quit()


def open_page(url: str) -> Page:
    """The page where selenium and a Chromium are installed."""
    try:
        from tests.e2e.ui.browser import MISSING
    except ImportError:
        return NoPage()
    return NoPage() if MISSING else OpenPage(url)
