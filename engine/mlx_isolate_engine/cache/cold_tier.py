"""What the prompt cache asks of a slower tier below RAM."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_isolate_engine.cache.ram_tier import Entry


@dataclass(frozen=True, kw_only=True)
class Found:
    """A stored entry that stands for `length` tokens of a prompt.

    Attributes:
        key: the entry's own tokens.
        bytes: what a restore of that length would read.
        handle: the tier's own.
    """

    namespace: str
    key: bytes
    length: int
    bytes: int
    handle: Any


@dataclass(frozen=True, kw_only=True)
class ColdStats:
    """A tier in numbers; bytes are those of the whole directory as last seen.

    Attributes:
        trouble: a sentence for a person where the last write was not possible, else empty.
    """

    entries: int = 0
    bytes: int = 0
    bytes_max: int = 0
    quarantined: int = 0
    evicted: int = 0
    longest_prefix: int = 0
    trouble: str = ""


class ColdTier(Protocol):
    """Entries that outlive the process. Any thread may call; only `store` may take long."""

    def find(self, namespace: str, key: bytes, *, length_max: int) -> Found | None:
        """The entry that stands for most tokens of `key`, at most `length_max`."""
        ...

    def has(self, namespace: str, key: bytes, *, cuttable: bool) -> bool:
        """Whether exactly these tokens, or (cuttable) more of them, are durably stored."""
        ...

    def restore(self, found: Found, *, room_for: int) -> Generator[None, None, list[Any]]:
        """Stream an entry in, tensor by tensor; call on the generation thread.

        Raises:
            CacheError: it cannot be used; it has been dealt with.
        """
        ...

    def store(self, entry: Entry, gate: Callable[[], None]) -> object:
        """Write an entry; returns once it is durable. `gate` is called before each tensor.

        Raises:
            OSError: not written; nothing is left behind.
            CacheError: it can never be written.
        """
        ...

    def touch(self, namespace: str, key: bytes) -> None:
        """Mark an entry as used, if it is stored."""
        ...

    def clear(self) -> int:
        """Delete all entries of this engine's model; returns how many."""
        ...

    def look_again(self) -> None:
        """Where the last write was not possible, see whether one is now."""
        ...

    def stats(self) -> ColdStats:
        """Figures now."""
        ...
