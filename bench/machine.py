"""What the figures of a bench depend on: the machine, its load, and the versions of what ran."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> dict[str, str]:
    """Facts to print above a table; `packages` are the distributions whose versions matter."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _processor() -> str:
    """As its maker calls it, where that is known."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
