"""The requests that have no outcome yet: listed, cancellable, counted when they end.

Implements the relay's observer; every call is a few operations per request, none per event.
"""

import asyncio

import msgspec

from mlx_isolate_shared.clock import Clock
from mlx_isolate_shared.errors import RequestError
from mlx_isolate_supervisor.relay.exchange import CANCELLED_BY_OPERATOR, Exchange
from mlx_isolate_supervisor.telemetry.events import EventHub
from mlx_isolate_supervisor.telemetry.metrics import Metrics, phase


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One running request as /v1/requests shows it; times in seconds.

    Attributes:
        phase: `queued`, `prefill` or `streaming`.
        ttft_s: from arrival to the first byte of the answer, None before it.
    """

    id: str
    model: str | None
    path: str
    stream: bool
    phase: str
    incarnation: int | None
    age_s: float
    queued_s: float
    ttft_s: float | None
    events: int
    bytes_out: int


class FirstTokens:
    """Times to first token since the last look, by model; feeds the charts."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, model: str, seconds: float) -> None:
        """Remember one time."""
        total, count = self._sums.get(model, (0.0, 0))
        self._sums[model] = (total + seconds, count + 1)

    def take(self, model: str) -> float | None:
        """The mean since the last call, None if there was none."""
        total, count = self._sums.pop(model, (0.0, 0))
        return total / count if count else None


class Requests:
    """Running requests by id, oldest first.

    Args:
        clock: the relay's clock.
        metrics: counts each ended request.
        hub: told of each outcome as `request.ended`.
    """

    def __init__(self, clock: Clock, metrics: Metrics, hub: EventHub) -> None:
        self._clock = clock
        self._metrics = metrics
        self._hub = hub
        # By object, not by id: two clients may choose the same id.
        self._running: dict[int, tuple[Exchange, asyncio.Task[object] | None]] = {}
        self.first_tokens = FirstTokens()

    def started(self, exchange: Exchange) -> None:
        """Called in the task that carries the request; cancelling that task cancels it."""
        self._running[id(exchange)] = (exchange, asyncio.current_task())

    def leased(self, exchange: Exchange) -> None:
        """Nothing to count yet."""

    def first_byte(self, exchange: Exchange) -> None:
        """Remember the time to first token of a stream."""
        if exchange.stream and exchange.model_id and exchange.first_byte_s is not None:
            self.first_tokens.add(exchange.model_id, exchange.first_byte_s - exchange.started_s)

    def ended(self, exchange: Exchange) -> None:
        """Count the outcome and tell it; the request is no longer listed."""
        self._running.pop(id(exchange), None)
        self._metrics.request_ended(exchange)
        assert exchange.ended_s is not None
        first = exchange.first_byte_s
        self._hub.publish(
            "request.ended",
            model=exchange.model_id,
            request_id=exchange.request_id,
            path=exchange.path,
            outcome=exchange.outcome,
            status=exchange.status,
            code=exchange.code,
            phase=phase(exchange),
            incarnation=exchange.incarnation,
            duration_s=round(exchange.ended_s - exchange.started_s, 4),
            ttft_s=None if first is None else round(first - exchange.started_s, 4),
            events=exchange.events,
            bytes_out=exchange.bytes_out,
        )

    def in_flight(self) -> dict[str, int]:
        """Running requests by model; "" for those whose model is not known."""
        counts: dict[str, int] = {}
        for exchange, _ in self._running.values():
            counts[exchange.model_id or ""] = counts.get(exchange.model_id or "", 0) + 1
        return counts

    def view(self) -> list[RequestView]:
        """Every running request, oldest first."""
        now = self._clock.monotonic()
        return [_view(exchange, now) for exchange, _ in self._running.values()]

    def cancel(self, request_id: str) -> int:
        """Cancel every running request with this id; how many there were.

        Raises:
            RequestError: 404 when there is none (any more).
        """
        found = [
            task
            for exchange, task in self._running.values()
            if exchange.request_id == request_id and task is not None
        ]
        if not found:
            raise RequestError(
                "there is no running request with this id; it may have ended.",
                status=404,
                code="request_not_found",
            )
        for task in found:
            task.cancel(CANCELLED_BY_OPERATOR)
        return len(found)


def _view(exchange: Exchange, now: float) -> RequestView:
    leased, first, passing = exchange.leased_s, exchange.first_byte_s, exchange.passing
    return RequestView(
        id=exchange.request_id,
        model=exchange.model_id,
        path=exchange.path,
        stream=exchange.stream,
        phase=phase(exchange),
        incarnation=exchange.incarnation,
        age_s=round(now - exchange.started_s, 3),
        queued_s=round((now if leased is None else leased) - exchange.started_s, 3),
        ttft_s=None if first is None else round(first - exchange.started_s, 3),
        events=exchange.events if passing is None else passing.events_passed,
        bytes_out=exchange.bytes_out if passing is None else passing.bytes_passed,
    )
