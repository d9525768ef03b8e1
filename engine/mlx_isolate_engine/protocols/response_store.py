"""Responses that a later request may continue, in a bounded store; lost with the engine."""

from collections import OrderedDict
from typing import Any

import msgspec

from mlx_isolate_engine.protocols.response_input import ListedItem

# Without these, conversations of many turns would fill the engine's memory.
RESPONSES_MAX = 256
RESPONSES_BYTES_MAX = 64 * 1024 * 1024


class KeptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response with the conversation that it ends, without instructions.

    Attributes:
        body: the response as JSON.
        messages: the conversation with its answer, in template form.
        items: the conversation without its answer, as it is listed.
        bytes: what it counts for.
    """

    body: bytes
    messages: tuple[dict[str, Any], ...]
    items: tuple[ListedItem, ...]
    bytes: int


class ResponseStore:
    """The most recently used responses by id."""

    def __init__(
        self, *, responses_max: int = RESPONSES_MAX, bytes_max: int = RESPONSES_BYTES_MAX
    ) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def put(
        self,
        response_id: str,
        body: bytes,
        messages: tuple[dict[str, Any], ...],
        items: tuple[ListedItem, ...],
    ) -> None:
        """Keep a response; the longest unused ones make room."""
        size = len(body) + len(msgspec.json.encode(messages))
        size += sum(len(bytes(item.json)) for item in items)
        self.remove(response_id)
        self._kept[response_id] = KeptResponse(
            body=body, messages=messages, items=items, bytes=size
        )
        self._bytes += size
        while self._kept and (
            len(self._kept) > self._responses_max or self._bytes > self._bytes_max
        ):
            self.remove(next(iter(self._kept)))

    def get(self, response_id: str) -> KeptResponse | None:
        """A kept response, which then counts as just used."""
        kept = self._kept.get(response_id)
        if kept is not None:
            self._kept.move_to_end(response_id)
        return kept

    def remove(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return False
        self._bytes -= kept.bytes
        return True
