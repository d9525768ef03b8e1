"""Fixtures of the page's tests: one browser for all of them, a daemon with scripted answers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.running_daemon import RunningDaemon

if TYPE_CHECKING:
    from tests.e2e.ui.browser import Browser

PROGRAM = (sys.executable, "-m", "tests.fakes.page_daemon")


@pytest.fixture(scope="package")
def browser() -> Iterator["Browser"]:
    """A headless Chromium; tests that need it are skipped where there is none."""
    pytest.importorskip("selenium", reason="needs selenium (the dev extra)")
    from tests.e2e.ui.browser import MISSING, Browser

    if MISSING is not None:
        pytest.skip(MISSING)
    found = Browser()
    yield found
    found.quit()


class Daemons:
    """Starts daemons over scripted engines, with the models `demo` and `second`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[RunningDaemon] = []

    def __call__(self, *flags: str, port: int = 0) -> RunningDaemon:
        models = [self._folder / name for name in ("demo", "second")]
        for model in models:
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text("{}")
        home = self._folder / f"home{len(self._started)}"
        daemon = RunningDaemon(home, *map(str, models), *flags, program=PROGRAM, port=port)
        self._started.append(daemon)
        return daemon.__enter__()

    def stop(self) -> None:
        for daemon in self._started:
            daemon.__exit__(None, None, None)


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons of one test's own."""
    daemons = Daemons(tmp_path)
    yield daemons
    daemons.stop()


@pytest.fixture(scope="package")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon for all tests of the page; each leaves it with its models loadable."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    yield daemons()
    daemons.stop()


@pytest.fixture
def page(browser: "Browser", shared_daemon: RunningDaemon) -> RunningDaemon:
    """A daemon whose page is open and connected, with both models ready."""
    for model in ("demo", "second"):
        assert shared_daemon.ask("POST", "/models/load", {"model": model}).status == 200
    browser.open(shared_daemon.url)
    browser.wait_live()
    return shared_daemon
