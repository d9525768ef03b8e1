"""A user's systemd as far as a service's installation needs it: reads units, runs their programs."""

import os
import re
import signal
import subprocess
from pathlib import Path

from mlx_isolate_supervisor.service.managers import Command, Done
from tests.running_daemon import ROOT, environment

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|.)")
_PLAIN = {"n": "\n", "t": "\t"}
STOP_DEADLINE_S = 20.0


def unquote(line: str, *, expands: bool) -> list[str]:
    """The words of a unit's line as systemd reads them: escapes, then `%%`, then `$$`."""

    def plain(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) == 3 else _PLAIN.get(code, code)

    words: list[str] = []
    for number, quoted in enumerate(_WORD.findall(line)):
        text = _ESCAPED.sub(plain, quoted).replace("%%", "%")
        words.append(text.replace("$$", "$") if expands and number else text)
    return words


class FakeSystemd:
    """Answers `systemctl --user` commands about the units in one folder.

    Args:
        folder: of the units.
        home: what its services have for a home.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder = folder
        self._home = home
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: list[Command] = []
        self.enabled: set[str] = set()

    def __call__(self, command: Command) -> Done:
        self.commands.append(command)
        if command[0] == "journalctl":
            path = self._home / f"{command[3]}.log"
            return Done(0, path.read_text() if path.exists() else "")
        assert command[:2] == ("systemctl", "--user")
        verb, units = command[2], [word for word in command[3:] if not word.startswith("--")]
        match verb:
            case "daemon-reload" | "reset-failed":
                return Done(0, "")
            case "enable":
                self.enabled.add(units[0])
                return Done(0, "")
            case "disable":
                self.enabled.discard(units[0])
                self._stop(units[0])
                return Done(0, "")
            case "restart":
                self._stop(units[0])
                return self._start(units[0])
            case "show":
                return Done(0, self._show(units[0]))
            case _:
                raise AssertionError(f"unknown verb {verb}")

    def close(self) -> None:
        for unit in list(self._processes):
            self._stop(unit)

    def _start(self, unit: str) -> Done:
        text = (self._folder / unit).read_text()
        line = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
        assert line is not None
        with (self._home / f"{unit}.log").open("wb") as log:
            self._processes[unit] = subprocess.Popen(
                unquote(line[1], expands=True),
                cwd=ROOT,
                env=environment(self._home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Done(0, "")

    def _stop(self, unit: str) -> None:
        process = self._processes.pop(unit, None)
        if process is not None and process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(STOP_DEADLINE_S)

    def _show(self, unit: str) -> str:
        process = self._processes.get(unit)
        if process is None:
            return "ActiveState=inactive\nMainPID=0\n"
        status = process.poll()
        if status is None:
            return f"ActiveState=active\nMainPID={process.pid}\n"
        return f"ActiveState={'failed' if status else 'inactive'}\nMainPID=0\n"
