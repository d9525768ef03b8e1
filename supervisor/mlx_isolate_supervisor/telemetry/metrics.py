"""What is counted about requests, engines and the supervisor itself.

Owns numbers only: a call costs a few dictionary operations and happens per request or per
lifecycle step, never per token. How they are written for Prometheus is in `exposition.py`, which
is imported at the first scrape so that starting up does not pay for it.
"""

from bisect import bisect_left
from collections import Counter

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.relay.exchange import Exchange

# Models that get a label of their own; without it a configuration that is reloaded for ever with
# new names makes the series grow for ever. The rest share OTHER.
MODEL_LABELS_MAX = 64
OTHER = "(other)"
# Error codes of one model that get a label of their own, for the same reason: some of them are an
# engine's own words.
CODE_LABELS_MAX = 64
# Requests that were refused before their model was known.
NO_MODEL = ""

TIME_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

PHASES = ("queued", "prefill", "streaming")

# Progress fields that only grow within one incarnation.
COUNTERS = ("prompt_tokens", "generated_tokens", "completed", "cancelled", "failed", "stalled")
CACHE_COUNTERS = (
    "hits",
    "misses",
    "hit_tokens",
    "restores",
    "spills",
    "dropped_spills",
    "failed_writes",
    "quarantined",
)


class Histogram:
    """Counts by upper bound; `bounds` ascending, seconds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value`, `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight


class ModelMetrics:
    """Numbers of one model since the supervisor's start."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.error_codes: Counter[str] = Counter()
        self.cancelled_phases: Counter[str] = Counter()
        self.queue = Histogram(TIME_BOUNDS_S)
        self.first_token = Histogram(TIME_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.duration = Histogram(TIME_BOUNDS_S)
        self.bytes_received = 0
        self.bytes_sent = 0
        self.events_sent = 0
        self.engine: Counter[str] = Counter()
        self.cache: Counter[str] = Counter()
        self._incarnation = 0
        self._seen = wire.Progress()

    def count_error(self, code: str) -> None:
        """Count an error; under `(other)` beyond CODE_LABELS_MAX codes."""
        if code not in self.error_codes and len(self.error_codes) >= CODE_LABELS_MAX:
            code = OTHER
        self.error_codes[code] += 1

    def fold(self, incarnation: int, progress: wire.Progress) -> None:
        """Add what an engine's counters have grown by; a new incarnation starts from zero."""
        if incarnation < self._incarnation:
            return
        if incarnation > self._incarnation:
            self._incarnation, self._seen = incarnation, wire.Progress()
        for name in COUNTERS:
            self.engine[name] += max(0, getattr(progress, name) - getattr(self._seen, name))
        for name in CACHE_COUNTERS:
            grown = getattr(progress.cache, name) - getattr(self._seen.cache, name)
            self.cache[name] += max(0, grown)
        self._seen = progress

    def forget_engine(self) -> None:
        """Take the next engine for a new one, whatever its number; the totals stay."""
        self._incarnation, self._seen = 0, wire.Progress()


class Metrics:
    """All counted numbers; every call happens on the event loop."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self.loop_lag = Histogram(LAG_BOUNDS_S)

    def of(self, model: str | None) -> ModelMetrics:
        """The numbers of a model; `(other)` beyond MODEL_LABELS_MAX models."""
        label = NO_MODEL if model is None else model
        numbers = self.models.get(label)
        if numbers is None:
            if len(self.models) >= MODEL_LABELS_MAX:
                label = OTHER
            numbers = self.models.setdefault(label, ModelMetrics())
        return numbers

    def forget_engines(self, served: set[str]) -> None:
        """Forget the engines of models that are not served: one served again numbers from 1."""
        for label, numbers in self.models.items():
            if label not in served and label != OTHER:
                numbers.forget_engine()

    def request_ended(self, exchange: Exchange) -> None:
        """Count one request that has its outcome."""
        numbers = self.of(exchange.model_id)
        assert exchange.outcome is not None and exchange.ended_s is not None
        numbers.outcomes[exchange.outcome] += 1
        if exchange.outcome == "cancelled":
            numbers.cancelled_phases[phase(exchange)] += 1
        elif exchange.outcome != "answered":
            numbers.count_error(exchange.code or f"http_{exchange.status or 0}")
        numbers.bytes_received += exchange.bytes_in
        numbers.bytes_sent += exchange.bytes_out
        numbers.events_sent += exchange.events
        numbers.duration.observe(exchange.ended_s - exchange.started_s)
        if exchange.leased_s is not None:
            numbers.queue.observe(exchange.leased_s - exchange.started_s)
        is_refusal = exchange.status is not None and exchange.status >= 400
        if exchange.stream and exchange.first_byte_s is not None and not is_refusal:
            numbers.first_token.observe(exchange.first_byte_s - exchange.started_s)
            if exchange.events > 1:
                gaps = exchange.events - 1
                mean = (exchange.ended_s - exchange.first_byte_s) / gaps
                numbers.inter_token.observe(mean, gaps)


def phase(exchange: Exchange) -> str:
    """How far a request has come: `queued`, `prefill` or `streaming`."""
    if exchange.leased_s is None:
        return "queued"
    return "prefill" if exchange.first_byte_s is None else "streaming"
