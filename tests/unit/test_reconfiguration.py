"""A configuration that is read again: which changes are noticed, and a disk that does not answer."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import reconfigure
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.reconfigure import Reconfiguration
from mlx_isolate_supervisor.service.notify import Notifier
from mlx_isolate_supervisor.settings.changes import ModelChanges
from mlx_isolate_supervisor.settings.file import read_file
from mlx_isolate_supervisor.settings.file_facts import FileFacts
from mlx_isolate_supervisor.settings.layers import Resolved
from tests.waiting import wait_until


def make(
    read: Callable[[], Resolved],
    told: list[str],
    file: Path = Path("/no/file"),
    seen: FileFacts | None = None,
) -> Reconfiguration:
    """A reconfiguration that watches `file`, and to which `read` gives nothing to apply."""
    model = ModelSpec(id="a", model="/a")
    settings = ServeSettings(models=(model,), config_path=str(file), watch_config=True)
    return Reconfiguration(settings, read, refuse, told.append, Notifier({}), seen)


def refuse(_: ServeSettings) -> ModelChanges:
    raise AssertionError


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_file_that_changed_while_the_daemon_started_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    monkeypatch.setattr(reconfigure, "WATCH_INTERVAL_S", 0.002)
    file = tmp_path / "config.yaml"
    file.write_text("models:\n  a:\n    path: /a\n")
    layer = read_file(file, {})
    if is_changed:
        file.write_text("models:\n  other:\n    path: /other\n")

    async def watch() -> bool:
        has_read = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read() -> Resolved:
            loop.call_soon_threadsafe(has_read.set)
            raise ConfigError("that is enough")

        running = asyncio.create_task(make(read, [], file, layer.facts).run())
        try:
            await asyncio.wait_for(has_read.wait(), 5 if is_changed else 0.05)
        except TimeoutError:
            return False
        finally:
            running.cancel()
        return True

    assert asyncio.run(watch()) == is_changed


def test_a_file_that_cannot_be_read_to_its_end_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a named pipe or the disk of a machine that is gone."""
    monkeypatch.setattr(reconfigure, "READ_LIMIT_S", 0.02)
    disk_answers = threading.Event()
    told: list[str] = []
    reads = 0

    def read() -> Resolved:
        nonlocal reads
        reads += 1
        if reads == 1:
            disk_answers.wait()
        raise ConfigError("that is enough")

    async def scenario() -> None:
        subject = make(read, told)
        await subject.reload()
        await subject.reload()

    # Its end too: a pool's thread would have to be waited for.
    asyncio.run(asyncio.wait_for(scenario(), 5))
    disk_answers.set()
    assert "could not be read in 0.02 s" in told[0] and "that is enough" in told[1]


def test_a_watched_disk_that_does_not_answer_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconfigure, "WATCH_INTERVAL_S", 0.002)
    disk_answers, is_asked = threading.Event(), threading.Event()

    def look(_: str) -> None:
        is_asked.set()
        disk_answers.wait(10)

    monkeypatch.setattr(reconfigure, "file_facts", look)

    def read() -> Resolved:
        raise ConfigError("that is enough")

    async def scenario() -> None:
        told: list[str] = []
        subject = make(read, told)
        running = asyncio.create_task(subject.run())
        await wait_until(is_asked.is_set, 5, "the disk is asked")
        subject.ask()
        await wait_until(lambda: told, 5, "the reload is told")
        running.cancel()

    asyncio.run(scenario())
    disk_answers.set()


def test_a_watch_without_a_thread_goes_on_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconfigure, "WATCH_INTERVAL_S", 0.002)
    start, left = threading.Thread.start, iter(range(3))

    def start_later(thread: threading.Thread) -> None:
        if next(left, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    def read() -> Resolved:
        raise ConfigError("that is enough")

    async def scenario() -> None:
        told: list[str] = []
        (tmp_path / "config.yaml").touch()
        running = asyncio.create_task(make(read, told, tmp_path / "config.yaml").run())
        await wait_until(lambda: told, 5, "the reload is told")
        running.cancel()

    monkeypatch.setattr(threading.Thread, "start", start_later)
    asyncio.run(scenario())
