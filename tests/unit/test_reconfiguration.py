"""Which changes of a watched configuration file are noticed, beside those made while it runs."""

import asyncio
from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import reconfigure
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.reconfigure import Reconfiguration
from mlx_isolate_supervisor.service.notify import Notifier
from mlx_isolate_supervisor.settings.changes import ModelChanges
from mlx_isolate_supervisor.settings.file import read_file
from mlx_isolate_supervisor.settings.layers import Resolved


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
    settings = ServeSettings(
        models=(ModelSpec(id="a", model="/a"),), config_path=str(file), watch_config=True
    )

    async def watch() -> bool:
        has_read = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read() -> Resolved:
            loop.call_soon_threadsafe(has_read.set)
            raise ConfigError("that is enough")

        def apply(_: ServeSettings) -> ModelChanges:
            raise AssertionError

        subject = Reconfiguration(settings, read, apply, lambda _: None, Notifier({}), layer.facts)
        running = asyncio.create_task(subject.run())
        try:
            await asyncio.wait_for(has_read.wait(), 5 if is_changed else 0.05)
        except TimeoutError:
            return False
        finally:
            running.cancel()
        return True

    assert asyncio.run(watch()) == is_changed
