"""Memory of engines and of this machine."""

import os
import sys

from mlx_isolate_shared.footprint import (
    PAGE_BYTES,
    MemoryKind,
    physical_footprint_bytes,
    proportional_bytes,
    resident_bytes,
)

# From this size on reading PSS takes too long for a loop that does other things.
_PSS_RSS_MAX = 256 << 20


def footprint(pid: int) -> tuple[int, MemoryKind] | None:
    """Bytes and measure of one process; None if it is gone or may not be looked at."""
    if sys.platform == "darwin":
        physical = physical_footprint_bytes(pid)
        return None if physical is None else (physical, "footprint")
    resident = resident_bytes(pid)
    if resident is None:
        return None
    if resident <= _PSS_RSS_MAX:
        pss = proportional_bytes(pid)
        if pss is not None:
            return pss, "pss"
    return resident, "rss"


def physical_bytes() -> int:
    """All memory of this machine."""
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


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
