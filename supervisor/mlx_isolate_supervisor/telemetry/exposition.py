"""The counted numbers in Prometheus' text format, written with prometheus_client.

Importing this module costs 60 ms, so it is imported at the first scrape.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from mlx_isolate_supervisor.telemetry.events import EventHub
from mlx_isolate_supervisor.telemetry.metrics import (
    CACHE_COUNTERS,
    COUNTERS,
    MODEL_LABELS_MAX,
    OTHER,
    PHASES,
    Histogram,
    Metrics,
    ModelMetrics,
)
from mlx_isolate_supervisor.telemetry.status import ModelStatus, State, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mlx_isolate_"
OUTCOMES = ("answered", "rejected", "failed", "cancelled")
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens run through the model.",
    "generated_tokens": "Tokens generated.",
}
_CACHE_HELP = {
    "hits": "Completions that began from a cached prefix.",
    "misses": "Completions that found no cached prefix.",
    "hit_tokens": "Prompt tokens taken from the prompt cache.",
    "restores": "Prefixes read back from disk.",
    "spills": "Prefixes written to disk.",
    "dropped_spills": "Prefixes not written, because the spill queue was full.",
    "failed_writes": "Prefixes whose write failed.",
    "quarantined": "Cache files put aside, because they were damaged.",
}


def write_metrics(
    metrics: Metrics, status: Status, hub: EventHub, in_flight: dict[str, int]
) -> bytes:
    """The whole page of one scrape; `in_flight` holds requests without an outcome by model."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(metrics, status, hub, in_flight))
    return generate_latest(registry)


class _Families(Collector):
    """Everything of one scrape as metric families."""

    def __init__(
        self, metrics: Metrics, status: Status, hub: EventHub, in_flight: dict[str, int]
    ) -> None:
        self._in_flight = in_flight
        self._metrics = metrics
        self._status = status
        self._hub = hub
        self._models = status.models[:MODEL_LABELS_MAX]

    def collect(self) -> Iterable[Metric]:
        """In the order of docs/observability.md."""
        yield from self._requests()
        yield from self._times()
        yield from self._relay()
        yield from self._engines()
        yield from self._engine_counters()
        yield from self._caches()
        yield from self._supervisor()

    def _requests(self) -> Iterator[Metric]:
        ended = _counter("requests", "Requests that ended, by outcome.", "model", "outcome")
        errors = _counter("request_errors", "Requests refused or failed.", "model", "code")
        cancelled = _counter(
            "requests_cancelled", "Requests whose client left or that were cancelled.",
            "model", "phase",
        )  # fmt: skip
        running = _gauge("requests_in_flight", "Requests without an outcome yet.", "model")
        for label, numbers in self._metrics.models.items():
            for outcome in OUTCOMES:
                ended.add_metric([label, outcome], numbers.outcomes[outcome])
            for code, count in numbers.error_codes.items():
                errors.add_metric([label, code], count)
            for phase in PHASES:
                cancelled.add_metric([label, phase], numbers.cancelled_phases[phase])
        shown = dict.fromkeys(self._metrics.models, 0)
        for label, count in self._in_flight.items():
            if label not in shown and len(shown) >= MODEL_LABELS_MAX:
                label = OTHER
            shown[label] = shown.get(label, 0) + count
        for label, count in shown.items():
            running.add_metric([label], count)
        yield from (ended, errors, cancelled, running)
        queued = _gauge("requests_queued", "Requests that wait in the supervisor.", "model")
        active = _gauge("requests_active", "Requests that hold a place in an engine.", "model")
        for model in self._models:
            queued.add_metric([model.id], model.queued)
            active.add_metric([model.id], model.active)
        yield from (queued, active)

    def _times(self) -> Iterator[Metric]:
        def histogram(name: str, text: str, pick: str) -> HistogramMetricFamily:
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model"])
            for label, numbers in self._metrics.models.items():
                _add_histogram(family, [label], getattr(numbers, pick))
            return family

        yield histogram(
            "request_queue_seconds", "From a request's arrival to its place in an engine.", "queue"
        )
        yield histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to the first byte of its streamed answer.",
            "first_token",
        )
        yield histogram(
            "inter_token_seconds",
            "Mean gap between the events of a streamed answer, once for each gap.",
            "inter_token",
        )
        yield histogram("request_duration_seconds", "From arrival to outcome.", "duration")

    def _relay(self) -> Iterator[Metric]:
        def counter(name: str, text: str, pick: str) -> CounterMetricFamily:
            family = _counter(name, text, "model")
            for label, numbers in self._metrics.models.items():
                family.add_metric([label], getattr(numbers, pick))
            return family

        yield counter("relay_received_bytes", "Bytes of request bodies.", "bytes_received")
        yield counter("relay_sent_bytes", "Bytes of answers sent on.", "bytes_sent")
        yield counter("relay_events", "Events (chunks) of answers sent on.", "events_sent")

    def _engines(self) -> Iterator[Metric]:
        state = _gauge("engine_state", "1 for the state a model is in.", "model", "state")
        number = _gauge("engine_incarnation", "Number of the engine's spawn.", "model")
        restarts = _counter("engine_restarts", "Respawns nobody asked for.", "model", "cause")
        load = _gauge("engine_load_seconds", "Load time of the running engine.", "model")
        memory = _gauge("engine_memory_bytes", "Memory of the engine process.", "model")
        claimed = _gauge(
            "engine_memory_claimed_bytes", "Memory that a model was given room for.", "model"
        )
        mlx = _gauge("engine_mlx_memory_bytes", "Memory as MLX counts it.", "model", "kind")
        for model in self._models:
            for name in get_args(State):
                state.add_metric([model.id, name], float(model.state == name))
            number.add_metric([model.id], model.incarnation)
            for cause, count in model.restarts_by_cause.items():
                restarts.add_metric([model.id, cause], count)
            if model.load_s is not None:
                load.add_metric([model.id], model.load_s)
            if model.memory_bytes is not None:
                memory.add_metric([model.id], model.memory_bytes)
            if model.claimed_bytes is not None:
                claimed.add_metric([model.id], model.claimed_bytes)
            if (seen := model.progress) is not None:
                mlx.add_metric([model.id, "active"], seen.mlx_active_bytes)
                mlx.add_metric([model.id, "peak"], seen.mlx_peak_bytes)
                mlx.add_metric([model.id, "cache"], seen.mlx_cache_bytes)
        yield from (state, number, restarts, load, memory, claimed, mlx)

    def _engine_counters(self) -> Iterator[Metric]:
        served = {model.id for model in self._models}
        known = {name: self._metrics.models.get(name, ModelMetrics()) for name in sorted(served)}
        for name, text in _ENGINE_COUNTERS.items():
            family = _counter(name, text, "model")
            for label, numbers in known.items():
                family.add_metric([label], numbers.engine[name])
            yield family
        ended = _counter(
            "engine_completions", "Completions by how the engine saw them end.", "model", "end"
        )
        for label, numbers in known.items():
            for name in COUNTERS[len(_ENGINE_COUNTERS) :]:
                ended.add_metric([label, name], numbers.engine[name])
        yield ended
        for name in CACHE_COUNTERS:
            family = _counter(f"cache_{name}", _CACHE_HELP[name], "model")
            for label, numbers in known.items():
                family.add_metric([label], numbers.cache[name])
            yield family

    def _caches(self) -> Iterator[Metric]:
        entries = _gauge("cache_entries", "Prefixes held.", "model", "tier")
        size = _gauge("cache_bytes", "Bytes held.", "model", "tier")
        limit = _gauge("cache_limit_bytes", "Bytes that may be held.", "model", "tier")
        pending = _gauge("cache_pending_spill_bytes", "Bytes waiting to be written.", "model")
        for model in self._models:
            if model.progress is None:
                continue
            cache = model.progress.cache
            _add_tier((entries, size, limit), model, "ram")
            if cache.ssd_enabled:
                _add_tier((entries, size, limit), model, "ssd")
            pending.add_metric([model.id], cache.pending_spill_bytes)
        yield from (entries, size, limit, pending)

    def _supervisor(self) -> Iterator[Metric]:
        own = self._status.supervisor
        budget = inf if own.memory_budget_bytes is None else own.memory_budget_bytes
        yield _single("memory_budget_bytes", "Memory that all engines may hold.", budget)
        yield _single(
            "memory_claimed_bytes", "Memory that models hold or were given room for.",
            own.memory_claimed_bytes,
        )  # fmt: skip
        yield _single("supervisor_memory_bytes", "Memory of the supervisor.", own.memory_bytes)
        yield _single("supervisor_uptime_seconds", "Age of the supervisor.", own.uptime_s)
        lag = HistogramMetricFamily(
            PREFIX + "supervisor_loop_lag_seconds",
            "How late the supervisor's event loop ran a timer.",
            labels=[],
        )
        _add_histogram(lag, [], self._metrics.loop_lag)
        yield lag
        yield _single("event_readers", "Readers of the event stream.", self._hub.readers)
        dropped = _counter("event_readers_dropped", "Readers dropped for being slow.")
        dropped.add_metric([], self._hub.dropped_readers)
        yield dropped
        yield InfoMetricFamily(
            PREFIX + "build", "Version that runs.", value={"version": own.version}
        )


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=list(labels))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=list(labels))


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _add_tier(families: tuple[GaugeMetricFamily, ...], model: ModelStatus, tier: str) -> None:
    assert model.progress is not None
    for family, field in zip(families, ("entries", "bytes", "bytes_max"), strict=True):
        value = getattr(model.progress.cache, f"{tier}_{field}")
        family.add_metric([model.id, tier], value)


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
    family.add_metric(labels, buckets, sum_value=histogram.sum)
