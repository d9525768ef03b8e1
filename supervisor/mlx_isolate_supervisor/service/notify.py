"""What a daemon tells systemd about itself, over the socket in NOTIFY_SOCKET; without it, nothing."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Tells the service manager of this process's life.

    Args:
        environment: where NOTIFY_SOCKET and WATCHDOG_USEC are; a WATCHDOG_PID that is not ours
            switches the watchdog off.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        # Twice within the window, as its documentation advises.
        self.watchdog_s = int(usec) / 2e6 if usec.isdecimal() and is_ours else 0.0

    def ready(self, status: str) -> None:
        """The daemon listens, or has reloaded."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The configuration is being read again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The orderly end has begun."""
        self._send("STOPPING=1")

    async def watch(self) -> None:
        """Say that the loop runs, for ever; returns at once where nobody listens."""
        while self._address and self.watchdog_s > 0:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A leading @ stands for the abstract namespace.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # A manager that does not listen must not end the daemon, nor hold it up.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(text.encode(), address)
