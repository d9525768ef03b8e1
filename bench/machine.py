"""What the figures of a bench depend on: the machine, its load, and the versions of what ran."""

import os
import platform
from importlib.metadata import version


def machine(*packages: str) -> dict[str, str]:
    """Facts to print above a table; `packages` are the distributions whose versions matter."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
