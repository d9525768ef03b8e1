"""What the kernel knows of a connection, and the event loop does not yet."""

import array
import asyncio
import fcntl
import os
import select
import termios

# What is read at once of a dead engine's last bytes.
_LAST_READ_BYTES = 64 * 1024


def _fd(transport: asyncio.Transport) -> int:
    fd: int = transport.get_extra_info("socket").fileno()
    return fd


def _poll(transport: asyncio.Transport, events: int) -> bool:
    poll = select.poll()
    poll.register(_fd(transport), events)
    return bool(poll.poll(0))


def is_silent(transport: asyncio.Transport) -> bool:
    """Whether the other end is open, and nothing has come from there."""
    return not transport.is_closing() and not _poll(transport, select.POLLIN)


def has_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other end is closed; a paused transport is not told."""
    return transport.is_closing() or _poll(transport, 0)


def unread_bytes(transport: asyncio.Transport) -> int:
    """What the other end has not taken yet, in this process and, where it tells, the kernel."""
    waiting = transport.get_write_buffer_size()
    queued = array.array("i", [0])
    try:
        fcntl.ioctl(_fd(transport), termios.TIOCOUTQ, queued)
    except OSError:
        return waiting
    return waiting + queued[0]


def read_now(transport: asyncio.Transport) -> bytes:
    """Some of what the connection holds; nothing where it holds nothing more, or has ended.

    Raises:
        OSError: it is broken, which the kernel tells once: the event loop hears of an end only.
    """
    try:
        return os.read(_fd(transport), _LAST_READ_BYTES)
    except BlockingIOError:
        return b""
