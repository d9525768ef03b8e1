"""How much memory this process holds, read often and so not always anew."""

import os
import sys
import time

from mlx_isolate_shared.footprint import (
    MemoryKind,
    physical_footprint_bytes,
    proportional_bytes,
    resident_bytes,
)

# PSS costs too much to be read for every progress line.
_PSS_EVERY_S = 5.0


class Footprint:
    """Reads the process's memory; one thread only."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pss_bytes: int | None = None
        self._pss_at = float("-inf")

    def read(self) -> tuple[int, MemoryKind]:
        """Bytes and what they are: macOS's physical footprint, Linux's PSS, else RSS."""
        if sys.platform == "darwin":
            return physical_footprint_bytes(self._pid) or 0, "footprint"
        now = time.monotonic()
        if now - self._pss_at >= _PSS_EVERY_S:
            self._pss_bytes, self._pss_at = proportional_bytes(self._pid), now
        if self._pss_bytes is not None:
            return self._pss_bytes, "pss"
        return resident_bytes(self._pid) or 0, "rss"
