"""How much memory a process holds, by the measure that means most on each system.

macOS: the physical footprint (what Activity Monitor shows; RSS leaves out compressed and
GPU-wired memory). Linux: PSS where it can be read cheaply enough, else RSS.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

from mlx_isolate_supervisor.status import MemoryKind

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# From this size on the kernel's walk over a process's pages (PSS) takes too long for a loop.
_PSS_RSS_MAX = 256 << 20


def footprint(pid: int) -> tuple[int, MemoryKind] | None:
    """Bytes and measure of one process; None if it is gone or may not be looked at."""
    if sys.platform == "darwin":
        return _footprint_macos(pid)
    return _footprint_linux(pid)


def physical_bytes() -> int:
    """All memory of this machine."""
    return _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int | None:
    """Memory that the system could give to a new process now; None if it does not say."""
    if sys.platform == "linux":
        try:
            with open("/proc/meminfo") as table:
                for line in table:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except (OSError, ValueError):
            return None
        return None
    import psutil

    return int(psutil.virtual_memory().available)


def _footprint_linux(pid: int) -> tuple[int, MemoryKind] | None:
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None
    if resident <= _PSS_RSS_MAX:
        pss = _pss(pid)
        if pss is not None:
            return pss, "pss"
    return resident, "rss"


def _pss(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


class _RusageInfoV2(ctypes.Structure):
    """`struct rusage_info_v2` of <sys/resource.h>: a uuid, then 64-bit counters."""

    _fields_ = (("uuid", ctypes.c_uint8 * 16), ("counters", ctypes.c_uint64 * 18))


_RUSAGE_INFO_V2 = 2
# user, system, pkg_idle_wkups, interrupt_wkups, pageins, wired_size, resident_size, phys_footprint
_PHYS_FOOTPRINT = 7


@functools.cache
def _libproc() -> Any:
    return ctypes.CDLL("/usr/lib/libproc.dylib")


def _footprint_macos(pid: int) -> tuple[int, MemoryKind] | None:
    info = _RusageInfoV2()
    if _libproc().proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(info)) != 0:
        return None
    return int(info.counters[_PHYS_FOOTPRINT]), "footprint"
