"""A systemd user unit as text; pure. Every value is quoted so that systemd reads it as it is."""

import re
from pathlib import Path

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.service.definition import Definition

# A loop that stands still for so long is restarted by systemd.
WATCHDOG_S = 60
_PROGRAM = re.compile(r'^ExecStart="((?:[^"\\]|\\.)*)"', re.MULTILINE)
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|.)")
_PLAIN = {"n": "\n", "t": "\t"}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}


def quote(text: str, *, expands: bool = False) -> str:
    """One word of a unit file.

    Args:
        text: what the program is to get.
        expands: whether `$` has a meaning there, as in the arguments of ExecStart.
    """
    parts: list[str] = []
    for character in text:
        if character == "$" and expands:
            parts.append("$$")
        elif character in _ESCAPES:
            parts.append(_ESCAPES[character])
        elif ord(character) < 32 or ord(character) == 127:
            parts.append(f"\\x{ord(character):02x}")
        else:
            parts.append(character)
    return f'"{"".join(parts)}"'


def program_of(content: bytes) -> Path | None:
    """The program that a unit of ours starts; None where that cannot be read."""
    found = _PROGRAM.search(content.decode(errors="replace"))
    if found is None:
        return None
    return Path(_ESCAPED.sub(_unescape, found[1]).replace("%%", "%"))


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) == 3 else _PLAIN.get(code, code)


def unit_text(service: Definition) -> str:
    """The whole unit."""
    program, *arguments = service.argv
    # Of the program's own path systemd expands no variables.
    command = " ".join([quote(program), *(quote(word, expands=True) for word in arguments)])
    environment = "".join(
        f"Environment={quote(f'{name}={value}')}\n"
        for name, value in sorted(service.environment.items())
    )
    description = f"mlx-isolate, language models on {service.url}".replace("%", "%%")
    return f"""\
# Written by `mlx-isolate service install`, which overwrites it.
[Unit]
Description={description}
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
{environment}Restart=on-failure
RestartSec=2
RestartPreventExitStatus={exit_codes.USAGE}
SuccessExitStatus=130 143
TimeoutStartSec=120
TimeoutStopSec={service.stop_timeout_s}
WatchdogSec={WATCHDOG_S}
KillMode=mixed
UMask=0077

[Install]
WantedBy=default.target
"""
