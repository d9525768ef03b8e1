"""`mlx-isolate top`: one picture in a pipe, a live one in a terminal, over a real daemon."""

import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator

import pytest

from mlx_isolate_supervisor.exit_codes import CUT_BASE
from tests.running_daemon import REAL, ROOT, RunningDaemon, environment, fake_model

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("top")
    with RunningDaemon(home / "home", str(fake_model(home / "m"))) as running:
        running.wait_state("ready")
        yield running


class TopTerminal:
    """`top` with a pseudo-terminal of the test."""

    def __init__(self, daemon: RunningDaemon) -> None:
        variables = environment(daemon.home, {"MLX_ISOLATE_URL": daemon.url, "TERM": "xterm"})
        variables |= {"COLUMNS": "140", "LINES": "40"}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(REAL[0], [*REAL, "top", "--interval", "0.2"], variables)
        self._seen = ""

    def wait_text(self, pattern: str) -> None:
        """Read until `pattern` is shown, colours and moves of the cursor left out."""
        end = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self._seen):
            assert time.monotonic() < end, f"{pattern!r} not in {self._seen[-2000:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                text = os.read(self._fd, 65536).decode("utf-8", "replace")
                self._seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        os.write(self._fd, b"\x03")
        end = time.monotonic() + DEADLINE_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    os.read(self._fd, 65536)
                except OSError:  # the other end has been closed
                    continue

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)


def test_top_in_a_pipe_prints_one_picture_without_colours(daemon: RunningDaemon) -> None:
    done = daemon.command("top", COLUMNS="140")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    pid = daemon.status()["models"][0]["pid"]
    assert re.search(rf"^m +ready +\S+ +{pid} +#1 +0 ", done.stdout, re.MULTILINE)


def test_headings_and_numbers_stay_whole_in_80_columns(daemon: RunningDaemon) -> None:
    done = daemon.command("top", COLUMNS="80")
    assert done.stdout.splitlines()[1].split() == [
        "MODEL", "STATE", "FOR", "PID", "ENGINE", "RESTARTS", "MEMORY", "TOK/S", "ACTIVE", "QUEUED",
        "CACHE",
    ]  # fmt: skip


def test_top_without_a_daemon_says_so(daemon: RunningDaemon) -> None:
    done = daemon.command("top", MLX_ISOLATE_URL="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no daemon answers" in done.stderr


def test_top_shows_a_kill_and_the_comeback_live(daemon: RunningDaemon) -> None:
    terminal = TopTerminal(daemon)
    try:
        terminal.wait_text(r"m +ready")
        daemon.ask("POST", "/drill/kill", {"model": "m"})
        terminal.wait_text(r"engine\.lost +m +ready → backoff")
        pid = daemon.wait_state("ready")["pid"]
        terminal.wait_text(rf"ready +\S+ +{pid}")
        daemon.chat()
        terminal.wait_text(r"request\.ended +m +answered")
        assert terminal.interrupt() == CUT_BASE + signal.SIGINT
    finally:
        terminal.close()
