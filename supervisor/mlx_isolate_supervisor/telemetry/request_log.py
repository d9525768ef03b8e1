"""One log line for each request that ended: who asked for what, and what became of it."""

import logging

from mlx_isolate_supervisor.relay.exchange import Exchange, RelayObserver
from mlx_isolate_supervisor.telemetry.logs import log_event


class RequestLog:
    """A relay observer that logs, and passes everything on.

    Args:
        inner: the observer that counts.
    """

    def __init__(self, inner: RelayObserver) -> None:
        self._inner = inner

    def started(self, exchange: Exchange) -> None:
        """Pass it on."""
        self._inner.started(exchange)

    def leased(self, exchange: Exchange) -> None:
        """Pass it on."""
        self._inner.leased(exchange)

    def first_byte(self, exchange: Exchange) -> None:
        """Pass it on."""
        self._inner.first_byte(exchange)

    def ended(self, exchange: Exchange) -> None:
        """Log the outcome; a failure, which is no client's doing, as a warning."""
        self._inner.ended(exchange)
        failed = exchange.outcome == "failed"
        log_event(
            "request.ended",
            logging.WARNING if failed else logging.INFO,
            id=exchange.request_id,
            model=exchange.model_id,
            path=exchange.path,
            outcome=exchange.outcome,
            status=exchange.status,
            code=exchange.code,
            incarnation=exchange.incarnation,
            seconds=_span(exchange.started_s, exchange.ended_s),
            first_byte_s=_span(exchange.started_s, exchange.first_byte_s),
            bytes_out=exchange.bytes_out,
        )


def _span(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s
