"""Ctrl-C before a command has begun, while it is still being imported; and in one that has."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from mlx_isolate_supervisor.exit_codes import CUT_BASE

# Presses Ctrl-C when the module named first is about to be imported, then runs the command line.
SCRIPT = """
import os, runpy, signal, sys

class Finger:
    def find_spec(self, name, path=None, target=None):
        if name == when:
            os.kill(os.getpid(), signal.SIGINT)

when = sys.argv.pop(1)
sys.meta_path.insert(0, Finger())
runpy.run_module("mlx_isolate_supervisor.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("ps", "argparse"),
        ("serve", "msgspec"),
        ("serve", "mlx_isolate_supervisor.commands.serve"),
        ("drill", "mlx_isolate_supervisor.drills.catalogue"),
    ],
)
def test_a_control_c_while_a_command_is_imported_ends_it_quietly(command: str, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (CUT_BASE + signal.SIGINT, "", "")


# The tool of `cache` as a process that says when it runs, and does not end by itself.
CACHE = """
import sys
from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.commands import cache

cache.TOOL = (sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()")
sys.exit(main(["cache", "ls", "--dir", "/"]))
"""


def test_a_control_c_ends_the_cache_tool_quietly() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", CACHE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with command:
        assert command.stdout is not None and command.stderr is not None
        tool = psutil.Process(int(command.stdout.readline()))
        # As a terminal does: to everybody in the foreground.
        os.killpg(command.pid, signal.SIGINT)
        assert command.stderr.read() == b""
        assert command.wait(30) == CUT_BASE + signal.SIGINT
    assert not tool.is_running()
