"""A cold tier in memory that tells who called it, can be held up, and can refuse."""

import threading
from collections.abc import Callable, Generator
from typing import Any

from mlx_isolate_engine.cache.cold_tier import ColdStats, Found
from mlx_isolate_engine.cache.ram_tier import Entry

TENSORS = 4


class FakeColdTier:
    """Keeps entries by exact tokens; every store takes TENSORS steps, each asked for."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, bytes], Entry] = {}
        self.store_threads: set[int] = set()
        self.steps = 0
        self.tensors = TENSORS
        self.error: BaseException | None = None
        self.attempts = 0
        # Called after each step, on the writer thread.
        self.on_step: Callable[[], None] = lambda: None

    def find(self, namespace: str, key: bytes, *, length_max: int) -> Found | None:
        best: Entry | None = None
        for (where, stored), entry in self.entries.items():
            fits = where == namespace and key.startswith(stored) and len(stored) // 4 <= length_max
            if fits and (best is None or len(stored) > len(best.key)):
                best = entry
        if best is None:
            return None
        length = len(best.key) // 4
        return Found(
            namespace=namespace, key=best.key, length=length, bytes=best.bytes, handle=best
        )

    def has(self, namespace: str, key: bytes, *, cuttable: bool) -> bool:
        return (namespace, key) in self.entries

    def restore(self, found: Found, *, room_for: int) -> Generator[None, None, list[Any]]:
        yield
        cache: list[Any] = found.handle.cache
        return cache

    def store(self, entry: Entry, gate: Callable[[], None]) -> None:
        self.attempts += 1
        self.store_threads.add(threading.get_ident())
        for _ in range(self.tensors):
            gate()
            if self.error is not None:
                raise self.error
            self.steps += 1
            self.on_step()
        self.entries[entry.namespace, entry.key] = entry

    def touch(self, namespace: str, key: bytes) -> None:
        pass

    def look_again(self) -> None:
        pass

    def clear(self) -> int:
        count = len(self.entries)
        self.entries.clear()
        return count

    def stats(self) -> ColdStats:
        lengths = [len(key) // 4 for _, key in self.entries]
        return ColdStats(entries=len(self.entries), longest_prefix=max(lengths, default=0))
