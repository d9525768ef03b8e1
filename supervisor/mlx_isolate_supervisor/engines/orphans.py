"""Engines on record: who lives now, and the end of those that an earlier supervisor left.

A record names a process by pid *and* start time, so that a reused pid is never signalled. The
records lie in the run directory; whoever holds its lock owns them.
"""

import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

# How long a killed orphan may take to go; it holds memory that the next load needs.
REAP_DEADLINE_S = 5.0
_POLL_S = 0.005


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process.

    Attributes:
        started: what `process_start` said of it.
    """

    pid: int
    started: str
    model: str
    incarnation: int


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start(pid: int) -> str | None:
    """When the process `pid` started, exactly and comparable; None if it is gone or a zombie."""
    if sys.platform != "linux":
        return _process_start_psutil(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so fields count from its last parenthesis.
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    # Ticks since boot; the boot's id keeps records of an earlier boot apart.
    return f"{_boot_id()}:{fields[19]}"


def _process_start_psutil(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.6f}"
    except psutil.Error:
        return None


def _record_path(folder: Path, pid: int) -> Path:
    return folder / f"engine-{pid}.json"


def record_engine(folder: Path, record: EngineRecord) -> None:
    """Write a record; the file appears whole or not at all."""
    path = _record_path(folder, record.pid)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(path)


def forget_engine(folder: Path, pid: int) -> None:
    """Remove a record, if it is there."""
    _record_path(folder, pid).unlink(missing_ok=True)


def _read_record(path: Path) -> EngineRecord | None:
    try:
        # Opening a pipe would wait for somebody at its other end.
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"", type=EngineRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _kill(record: EngineRecord) -> bool:
    """SIGKILL the recorded process with its group, if it still is that process."""
    if process_start(record.pid) != record.started:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(record.pid) == record.pid:
            os.killpg(record.pid, signal.SIGKILL)
        else:
            os.kill(record.pid, signal.SIGKILL)
        return True
    return False


def reap_orphans(folder: Path) -> tuple[EngineRecord, ...]:
    """End every engine that an earlier supervisor recorded in `folder` and left behind.

    To be called with the run directory's lock held, before anything is spawned. Blocks until they
    are gone, at most REAP_DEADLINE_S.

    Returns:
        Those that were still alive. Their records are removed.
    """
    killed: list[EngineRecord] = []
    for path in sorted(folder.glob("engine-*")):
        record = _read_record(path) if path.suffix == ".json" else None
        if record is not None and _kill(record):
            killed.append(record)
        with contextlib.suppress(OSError):  # a folder, say, which is not ours
            path.unlink()
    deadline = time.monotonic() + REAP_DEADLINE_S
    for record in killed:
        while process_start(record.pid) == record.started and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return tuple(killed)
