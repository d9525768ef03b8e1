"""Folders of the daemon that are full, read-only or no folders: it serves on, and says so."""

from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for


@pytest.mark.case("22")
def test_a_log_file_on_a_full_disk_costs_its_lines_and_nothing_else(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    port = free_port()
    home = tmp_path / "home"
    file = home / f"logs/mlx-isolate-{port}.log"
    file.parent.mkdir(parents=True)
    file.symlink_to(full)
    with RunningDaemon(home, str(fake_model(tmp_path / "m")), port=port) as daemon:
        daemon.wait_state("ready")
        wait_for(lambda: "log.not_written" in daemon.stderr, 10, "a word of it")
        for _ in range(20):
            assert daemon.chat().status == 200
        assert "No space left on device" in daemon.stderr
        assert b"log.not_written" in daemon.ask("GET", "/logs").body
        file.unlink()
        assert daemon.chat().status == 200
        wait_for(lambda: "log.written_again" in daemon.stderr, 10, "a word of that too")
        wait_for(lambda: "request.ended" in file.read_text(), 10, "lines in the new file")
        assert daemon.stderr.count("log.not_written") == 1, "it is told once"


def test_a_state_folder_that_is_none_costs_what_is_remembered_and_nothing_else(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "state").write_text("")
    with RunningDaemon(home, str(fake_model(tmp_path / "m")), "--log-dir", "") as daemon:
        daemon.wait_state("ready")
        assert daemon.chat().status == 200
        assert daemon.ask("POST", "/models/unload", {"model": "m"}).status == 200
        assert daemon.chat().status == 200
        assert "message_failed" not in daemon.stderr
        assert daemon.stderr.count("state.not_saved") >= 1
