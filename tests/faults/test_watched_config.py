"""A watched configuration is read again however an editor puts it in place."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for


def by_rename(file: Path, text: str) -> None:
    """As vim and most others do."""
    new = file.with_suffix(".swp")
    new.write_text(text)
    new.replace(file)


def in_place(file: Path, text: str) -> None:
    """As nano does, here on a slow disk: the file is empty, then half there, then whole."""
    with file.open("w") as open_file:
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            open_file.flush()
            time.sleep(0.2)
            open_file.write(part)


def of_the_same_size_and_time(file: Path, text: str) -> None:
    """As rsync and other restorers of times do."""
    before = file.stat()
    file.write_text(text.ljust(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_link(file: Path, text: str) -> None:
    """As Kubernetes and Nix do: the name is a link, which another link replaces."""
    target = file.parent / f"version{len(list(file.parent.glob('version*')))}"
    target.write_text(text)
    link = file.with_suffix(".link")
    link.symlink_to(target)
    link.replace(file)


def by_removal(file: Path, text: str) -> None:
    """Away for a while, and back."""
    file.unlink()
    time.sleep(1.2)
    file.write_text(text)


@pytest.mark.parametrize(
    "put", [by_rename, in_place, of_the_same_size_and_time, by_link, by_removal]
)
def test_a_watched_file_is_read_again_however_it_was_written(
    tmp_path: Path, put: Callable[[Path, str], None]
) -> None:
    models = {name: {"path": str(fake_model(tmp_path / name))} for name in ("one", "two")}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"models": models, "hooks": {}}))
    flags = ("--config", str(file), "--watch-config")
    with RunningDaemon(tmp_path / "home", *flags) as daemon:
        pid = daemon.ask("POST", "/models/load", {"model": "one"}).json()["pid"]
        put(file, json.dumps({"models": {"one": models["one"]}}))
        wait_for(lambda: daemon.status()["models"][1:] == [], 10, "the other model is gone")
        assert daemon.status()["models"][0]["pid"] == pid
        put(file, json.dumps({"models": models}))
        wait_for(lambda: daemon.status()["models"][1:] != [], 10, "it is back")
        assert daemon.status()["models"][0]["pid"] == pid
        assert "configuration stays as it was" not in daemon.stdout
