"""Counting: outcomes, phases, histograms, counters over incarnations, bounded labels."""

import subprocess
import sys

from mlx_isolate_shared import wire
from mlx_isolate_shared.clock import SystemClock
from mlx_isolate_supervisor.relay.exchange import Exchange
from mlx_isolate_supervisor.slots.lease import Outcome
from mlx_isolate_supervisor.telemetry.history import History
from mlx_isolate_supervisor.telemetry.inflight import FirstTokens
from mlx_isolate_supervisor.telemetry.metrics import (
    CODE_LABELS_MAX,
    MODEL_LABELS_MAX,
    OTHER,
    TOKEN_BOUNDS_S,
    Histogram,
    Metrics,
    ModelMetrics,
    phase,
)
from mlx_isolate_supervisor.telemetry.sampler import Sampler
from tests.fakes.statuses import ready_status


def exchange(
    outcome: Outcome, *, leased: float | None = 1.0, first: float | None = 2.0, events: int = 5
) -> Exchange:
    return Exchange(
        request_id="r",
        path="/v1/chat/completions",
        started_s=0.0,
        model_id="m",
        stream=True,
        leased_s=leased,
        first_byte_s=first,
        ended_s=4.0,
        status=200,
        outcome=outcome,
        bytes_in=10,
        bytes_out=20,
        events=events,
    )


def test_answered_request_fills_every_time() -> None:
    metrics = Metrics()
    metrics.request_ended(exchange("answered"))
    numbers = metrics.of("m")
    assert numbers.outcomes == {"answered": 1}
    assert numbers.queue.sum == 1.0
    assert numbers.first_token.sum == 2.0
    assert numbers.duration.sum == 4.0
    assert (numbers.bytes_received, numbers.bytes_sent, numbers.events_sent) == (10, 20, 5)


def test_inter_token_counts_each_gap_at_the_mean() -> None:
    metrics = Metrics()
    metrics.request_ended(exchange("answered", events=5))
    gaps = metrics.of("m").inter_token
    assert sum(gaps.counts) == 4
    assert gaps.sum == 2.0


def test_one_event_has_no_gap() -> None:
    metrics = Metrics()
    metrics.request_ended(exchange("answered", events=1))
    assert sum(metrics.of("m").inter_token.counts) == 0


def test_phases_follow_how_far_a_request_came() -> None:
    assert phase(exchange("cancelled", leased=None, first=None)) == "queued"
    assert phase(exchange("cancelled", first=None)) == "prefill"
    assert phase(exchange("cancelled")) == "streaming"


def test_cancelled_is_no_error_and_failed_is_one_by_code() -> None:
    metrics = Metrics()
    metrics.request_ended(exchange("cancelled", first=None))
    failed = exchange("failed")
    failed.code = "engine_died"
    metrics.request_ended(failed)
    numbers = metrics.of("m")
    assert numbers.error_codes == {"engine_died": 1}
    assert numbers.cancelled_phases == {"prefill": 1}


def test_histogram_puts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert list(TOKEN_BOUNDS_S) == sorted(TOKEN_BOUNDS_S)


def test_counters_add_up_over_incarnations() -> None:
    numbers = ModelMetrics()
    numbers.fold(1, wire.Progress(generated_tokens=10, cache=wire.CacheFigures(hits=2)))
    numbers.fold(1, wire.Progress(generated_tokens=15, cache=wire.CacheFigures(hits=2)))
    numbers.fold(2, wire.Progress(generated_tokens=4, cache=wire.CacheFigures(hits=1)))
    assert numbers.engine["generated_tokens"] == 19
    assert numbers.cache["hits"] == 3


def test_late_line_of_an_older_incarnation_is_not_counted_again() -> None:
    numbers = ModelMetrics()
    numbers.fold(1, wire.Progress(generated_tokens=10))
    numbers.fold(2, wire.Progress(generated_tokens=1))
    numbers.fold(1, wire.Progress(generated_tokens=10))
    assert numbers.engine["generated_tokens"] == 11


def test_counter_that_falls_back_never_lowers_a_total() -> None:
    numbers = ModelMetrics()
    numbers.fold(1, wire.Progress(generated_tokens=10))
    numbers.fold(1, wire.Progress(generated_tokens=3))
    assert numbers.engine["generated_tokens"] == 10


def test_a_model_that_a_reload_takes_out_and_another_brings_back_is_counted_on() -> None:
    metrics = Metrics()
    sampler = Sampler(SystemClock(), metrics, History(), FirstTokens(), lambda: ())
    for served in (
        (ready_status(id="m", incarnation=3, progress=wire.Progress(generated_tokens=10)),),
        (ready_status(id="other"),),
        (ready_status(id="m", incarnation=1, progress=wire.Progress(generated_tokens=4)),),
    ):
        sampler.fold(served)
    assert metrics.of("m").engine["generated_tokens"] == 14


def test_model_labels_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MODEL_LABELS_MAX * 3):
        metrics.of(f"m{number}").bytes_sent += 1
    assert len(metrics.models) == MODEL_LABELS_MAX + 1
    assert metrics.models[OTHER].bytes_sent == MODEL_LABELS_MAX * 2


def test_error_labels_are_bounded_whatever_engines_call_their_errors() -> None:
    metrics = Metrics()
    for number in range(CODE_LABELS_MAX * 3):
        failed = exchange("failed")
        failed.code = f"code_{number}"
        metrics.request_ended(failed)
    codes = metrics.of("m").error_codes
    assert len(codes) == CODE_LABELS_MAX + 1
    assert codes[OTHER] == CODE_LABELS_MAX * 2


def test_starting_up_does_not_pay_for_prometheus() -> None:
    script = (
        "import sys, mlx_isolate_supervisor.app, mlx_isolate_supervisor.daemon;"
        "sys.exit('prometheus_client' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
