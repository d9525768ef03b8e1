"""What is known about one request on its way through the relay, for whoever counts or logs."""

import dataclasses
from typing import Protocol

from mlx_isolate_supervisor.slots.lease import Outcome

# The message with which an observer cancels the task of a running request, so that its client
# is told so; a cancellation without it is a shutdown or a client that has gone.
CANCELLED_BY_OPERATOR = "cancelled by the operator"


class PassedOn(Protocol):
    """What of the current answer has been passed on; an engine's connection counts it anyway."""

    @property
    def bytes_passed(self) -> int:
        """Body bytes."""
        ...

    @property
    def events_passed(self) -> int:
        """Chunks, one per SSE event."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its answer so far. Times are monotonic seconds, sizes bytes.

    Attributes:
        path: the work endpoint, without a query.
        model_id: the slot's id, None while (or if) no slot was found.
        incarnation: of the engine that got the request, None before a lease.
        stream: whether the client asked for a stream.
        keep_alive: the request's `keep_alive`, as given.
        ttl_s: the request's `ttl`, as given.
        status: of the answer that was sent, None when none was.
        code: the error's code, if the supervisor answered with one.
        outcome: None until it ended.
        events: chunks of the answer that were passed on (one per SSE event).
        passing: counts of an answer that is under way; `bytes_out` and `events` are set at its
            end.
    """

    request_id: str
    path: str
    started_s: float
    model_id: str | None = None
    incarnation: int | None = None
    stream: bool = False
    keep_alive: str | float | None = None
    ttl_s: float | None = None
    leased_s: float | None = None
    first_byte_s: float | None = None
    ended_s: float | None = None
    status: int | None = None
    code: str | None = None
    outcome: Outcome | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    events: int = 0
    passing: PassedOn | None = None


class RelayObserver(Protocol):
    """Told of each request three to four times; never per chunk. Must not raise or block."""

    def started(self, exchange: Exchange) -> None:
        """The request's head has arrived."""
        ...

    def leased(self, exchange: Exchange) -> None:
        """A place in an engine was given; its incarnation is known."""
        ...

    def first_byte(self, exchange: Exchange) -> None:
        """The first byte of the answer's body is on its way to the client."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """The outcome is known. Called exactly once for each `started`."""
        ...


class SilentObserver:
    """Counts nothing."""

    def started(self, exchange: Exchange) -> None:
        """Do nothing."""

    def leased(self, exchange: Exchange) -> None:
        """Do nothing."""

    def first_byte(self, exchange: Exchange) -> None:
        """Do nothing."""

    def ended(self, exchange: Exchange) -> None:
        """Do nothing."""
