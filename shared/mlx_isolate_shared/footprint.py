"""How much memory a process holds, by the measure that means most on each system.

macOS: the physical footprint (what Activity Monitor shows; RSS leaves out compressed and GPU-wired
memory). Linux: PSS, which counts a page that several processes share only once, or RSS, which is
cheap to read. Who asks decides how often PSS is worth its price: the kernel walks over all pages of
the process, about 1 ms a GiB.
"""

import ctypes
import functools
import os
from typing import Any, Literal

MemoryKind = Literal["footprint", "pss", "rss"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pid: int) -> int | None:
    """Linux: PSS of a process; None if it is gone, may not be looked at, or has no such measure."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def resident_bytes(pid: int) -> int | None:
    """Linux: RSS of a process; None if it is gone or may not be looked at."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as sizes:
            return int(sizes.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
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


def physical_footprint_bytes(pid: int) -> int | None:
    """macOS: physical footprint of a process; None if it is gone or may not be looked at."""
    info = _RusageInfoV2()
    if _libproc().proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(info)) != 0:
        return None
    return int(info.counters[_PHYS_FOOTPRINT])
