"""How much memory this process holds, in the unit its system judges it by."""

import ctypes
import ctypes.util
import os
import sys
import time
from typing import Literal

Kind = Literal["footprint", "pss", "rss"]

# Reading PSS walks the page tables: about 1 ms a GiB, so it is not done for every progress line.
_PSS_EVERY_S = 5.0
_RUSAGE_INFO_V0 = 0


class Footprint:
    """Reads the process's memory; one thread only."""

    def __init__(self) -> None:
        self._pss_bytes: int | None = None
        self._pss_at = float("-inf")

    def read(self) -> tuple[int, Kind]:
        """Bytes and what they are: macOS's physical footprint, Linux's PSS, else RSS."""
        if sys.platform == "darwin":
            return _physical_footprint(), "footprint"
        now = time.monotonic()
        if now - self._pss_at >= _PSS_EVERY_S:
            self._pss_bytes, self._pss_at = _pss(), now
        if self._pss_bytes is not None:
            return self._pss_bytes, "pss"
        return _rss(), "rss"


def _pss() -> int | None:
    try:
        with open("/proc/self/smaps_rollup", "rb") as lines:
            for line in lines:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _rss() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _RusageInfoV0(ctypes.Structure):
    """macOS's struct rusage_info_v0 (sys/resource.h)."""

    _fields_ = [
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    ]


def _physical_footprint() -> int:
    libproc = ctypes.CDLL(ctypes.util.find_library("proc"))
    info = _RusageInfoV0()
    if libproc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(info)) != 0:
        return 0
    return int(info.ri_phys_footprint)
