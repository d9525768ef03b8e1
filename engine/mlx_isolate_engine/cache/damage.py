"""Why a cache file cannot be used: one error with a reason that is counted."""

from typing import Literal

from mlx_isolate_shared.errors import CacheError

Reason = Literal[
    "vanished", "unreadable", "length", "header", "version", "fingerprint", "data", "structure"
]


class Damage(CacheError):
    """A file of the cache that is not what it should be.

    Attributes:
        reason: `vanished` (evicted by somebody else: normal), `unreadable` (the system refused),
            `length` (truncated or grown), `header` (checksum or syntax), `version` (another
            layout), `fingerprint` (made for another model, tokenizer or setting), `data` (tensor
            checksum), `structure` (tensors that do not make a cache).
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason
