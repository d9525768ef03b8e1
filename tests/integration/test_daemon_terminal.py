"""What a person at a terminal sees: a bar while loading, Ctrl-C, Ctrl-C again."""

import os
import pty
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_isolate_supervisor.exit_codes import CUT_BASE, FAILED, OK
from mlx_isolate_supervisor.stop_signals import REPEAT_S
from tests.free_port import free_port
from tests.running_daemon import FAKE, ROOT, RunningDaemon, environment, fake_model
from tests.waiting import wait_for

DEADLINE_S = 20.0


class Terminal:
    """A daemon whose controlling terminal is a pseudo-terminal of the test."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._run_dir = tempfile.mkdtemp(prefix="mi")
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            flags = ["--port", "0", "--run-dir", self._run_dir]
            os.execve(FAKE[0], [*FAKE, "serve", *arguments, *flags], environment(home))
        self.pid = pid
        self.seen = ""

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def wait_text(self, pattern: str, keys: bytes = b"") -> re.Match[str]:
        """Read until `pattern` has been shown; whenever nothing is, somebody types `keys`.

        Not at once: a second signal so soon is the first one's repetition, and one more than the
        daemon has told about may meet a Python that is on its way out.
        """
        end = time.monotonic() + DEADLINE_S
        while True:
            found = re.search(pattern, self.seen, re.MULTILINE)
            if found:
                return found
            assert time.monotonic() < end, f"{pattern!r} not in {self.seen!r}"
            if not self._read(5 * REPEAT_S):
                self.type(keys)

    def wait_end(self) -> int:
        """The exit status."""
        end = time.monotonic() + DEADLINE_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, self.seen
            self._read(0.02)

    def _read(self, wait_s: float) -> bool:
        """Whether something was shown."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return False
        try:
            self.seen += os.read(self._fd, 65536).decode()
        except OSError:  # the other end has been closed
            return False
        return True

    def close(self) -> None:
        try:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)
        shutil.rmtree(self._run_dir, ignore_errors=True)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    model = fake_model(tmp_path / "m", load_s=0.3)
    opened = Terminal(tmp_path / "home", str(model), "--api-key", "k")
    try:
        yield opened
    finally:
        opened.close()


def test_a_bar_moves_while_a_model_loads_and_is_gone_afterwards(terminal: Terminal) -> None:
    terminal.wait_text(r"m: weights \S+ +\d+%")
    ready = terminal.wait_text(r"m: ready in \S+ \(fake")
    assert "\r\x1b[K" in terminal.seen[: ready.start()]
    assert "INFO" not in terminal.seen


def test_control_c_drains_and_says_how_to_cut(terminal: Terminal) -> None:
    terminal.wait_text("m: ready")
    terminal.type(b"\x03")
    terminal.wait_text("a second Ctrl-C cuts them")
    assert terminal.wait_end() == OK


def test_a_second_control_c_cuts(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m", ignore_term=True)
    terminal = Terminal(tmp_path / "home", str(model))
    try:
        terminal.wait_text("m: ready")
        terminal.type(b"\x03")
        terminal.wait_text("a second Ctrl-C cuts")
        terminal.wait_text("cutting what still runs", keys=b"\x03")
        assert terminal.wait_end() == CUT_BASE + 2
    finally:
        terminal.close()


def test_an_engines_death_is_told_above_everything_else(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m", die="SIGKILL", die_after_ready_s=0.2, until_incarnation=1)
    terminal = Terminal(tmp_path / "home", str(model))
    try:
        terminal.wait_text("m lost its engine: .*SIGKILL")
        terminal.wait_text(r"m: ready(?s:.*)m: ready")
    finally:
        terminal.close()


CLI = f"{FAKE[0]} -m mlx_isolate_supervisor.cli"


def run_shell(home: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, with output buffered as it is for users."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={k: v for k, v in environment(home).items() if k != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("words", ["serve --help", "config show", "--version"])
def test_a_command_in_a_pipe_that_closes_early_is_silent(tmp_path: Path, words: str) -> None:
    # The reader has gone before the first word is written.
    outcome = run_shell(tmp_path, f"exec 3> >(exec <&-); wait $!; {CLI} {words} >&3")
    assert (outcome.returncode, outcome.stderr) == (OK, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a full device")
def test_output_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    outcome = run_shell(tmp_path, f"{CLI} config show > /dev/full")
    assert outcome.returncode == FAILED
    assert outcome.stderr == (
        "mlx-isolate: the output cannot be written: No space left on device\n"
    )


def test_a_daemon_without_standard_streams_serves(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m")
    closed = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *FAKE)
    daemon = RunningDaemon(tmp_path / "home", str(model), program=closed, port=free_port())
    try:
        wait_for(lambda: is_listening(daemon.port), DEADLINE_S, "the daemon listens")
        assert daemon.chat().status == 200
        daemon.process.terminate()
        assert daemon.wait_end(DEADLINE_S) == OK
    finally:
        daemon.__exit__(None, None, None)


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
