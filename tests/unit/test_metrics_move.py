"""Each documented metric moves, by as much as happened."""

import asyncio
import re
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_isolate_shared import wire
from mlx_isolate_shared.clock import SystemClock
from mlx_isolate_supervisor.relay.exchange import Exchange
from mlx_isolate_supervisor.slots.lease import Outcome
from mlx_isolate_supervisor.telemetry.events import EventHub
from mlx_isolate_supervisor.telemetry.exposition import write_metrics
from mlx_isolate_supervisor.telemetry.metrics import MODEL_LABELS_MAX, OTHER, Metrics
from mlx_isolate_supervisor.telemetry.status import Status
from tests.architecture.generated import ROOT
from tests.fakes.statuses import ready_status, status

ROW = re.compile(r"^\| `(mlx_isolate_\w+)` \|", re.MULTILINE)
DOCUMENTED = ROW.findall((ROOT / "docs/observability.md").read_text())
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

CACHE = wire.CacheFigures(
    ram_entries=1, ram_bytes=2, ram_bytes_max=3, ssd_enabled=True, ssd_entries=4, ssd_bytes=5,
    ssd_bytes_max=6, pending_spill_bytes=7, hits=8, misses=9, hit_tokens=10, restores=11,
    spills=12, dropped_spills=13, failed_writes=14, quarantined=15,
)  # fmt: skip
DONE = wire.Progress(
    prompt_tokens=21, generated_tokens=22, completed=23, cancelled=24, failed=25, stalled=26,
    mlx_active_bytes=27, mlx_peak_bytes=28, mlx_cache_bytes=29, cache=CACHE,
)  # fmt: skip


def ended(outcome: Outcome, code: str | None = None) -> Exchange:
    return Exchange(
        request_id="r", path="/v1/chat/completions", started_s=0.0, model_id="m", stream=True,
        leased_s=1.0, first_byte_s=2.0, ended_s=4.0, status=200, outcome=outcome, code=code,
        bytes_in=10, bytes_out=20, events=5,
    )  # fmt: skip


def busy_status() -> Status:
    model = ready_status(
        id="m",
        incarnation=3,
        active=1,
        queued=2,
        restarts=1,
        restarts_by_cause={"signal": 1},
        load_s=9.0,
        memory_bytes=1000,
        claimed_bytes=2000,
        progress=DONE,
    )
    found = status(model)
    own = msgspec.structs.replace(
        found.supervisor,
        version="9.9.9",
        uptime_s=9000.0,
        memory_bytes=77,
        memory_budget_bytes=3000,
        memory_claimed_bytes=2000,
    )
    return msgspec.structs.replace(found, supervisor=own)


def samples(text: bytes) -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


async def before_and_after() -> tuple[Samples, Samples]:
    metrics, hub = Metrics(), EventHub(SystemClock())
    metrics.of("m")
    idle = status(ready_status(id="m", state="starting", progress=wire.Progress()))
    before = dict(samples(write_metrics(metrics, idle, hub, {})))
    for outcome in ("answered", "cancelled", "rejected"):
        metrics.request_ended(ended(outcome))
    metrics.request_ended(ended("failed", "engine_died"))
    metrics.of("m").fold(3, DONE)
    metrics.loop_lag.observe(0.5)
    hub.subscribe()
    hub.subscribe().close(slow=True)
    after = dict(samples(write_metrics(metrics, busy_status(), hub, {"m": 3})))
    return before, after


BEFORE, AFTER = asyncio.run(before_and_after())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_metric_moves(name: str) -> None:
    family = {key for key in AFTER if key[0] in (name, f"{name}_count", f"{name}_sum")}
    moved = {key for key in family if AFTER[key] != BEFORE.get(key)}
    assert moved, name
    assert {key for key in family if key[0].endswith("_sum")} <= moved


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("requests_total", {"outcome": "failed"}, 1),
        ("request_errors_total", {"code": "engine_died"}, 1),
        ("requests_cancelled_total", {"phase": "streaming"}, 1),
        ("requests_in_flight", {}, 3),
        ("requests_queued", {}, 2),
        ("request_queue_seconds_sum", {}, 4),
        ("time_to_first_token_seconds_sum", {}, 8),
        ("inter_token_seconds_count", {}, 16),
        ("request_duration_seconds_sum", {}, 16),
        ("relay_sent_bytes_total", {}, 80),
        ("relay_events_total", {}, 20),
        ("engine_restarts_total", {"cause": "signal"}, 1),
        ("engine_memory_claimed_bytes", {}, 2000),
        ("engine_mlx_memory_bytes", {"kind": "peak"}, 28),
        ("engine_completions_total", {"end": "stalled"}, 26),
        ("cache_hit_tokens_total", {}, 10),
        ("cache_bytes", {"tier": "ssd"}, 5),
        ("cache_pending_spill_bytes", {}, 7),
    ],
)
def test_metric_says_how_much(name: str, labels: dict[str, str], value: float) -> None:
    key = (f"mlx_isolate_{name}", tuple(sorted({"model": "m", **labels}.items())))
    assert AFTER[key] == value


def test_a_budget_without_a_limit_is_infinite() -> None:
    assert BEFORE["mlx_isolate_memory_budget_bytes", ()] == float("inf")
    assert AFTER["mlx_isolate_memory_budget_bytes", ()] == 3000
    assert AFTER["mlx_isolate_memory_claimed_bytes", ()] == 2000


def test_running_requests_have_no_more_models_than_ended_ones() -> None:
    running = {f"m{number}": 1 for number in range(MODEL_LABELS_MAX + 5)}
    hub = EventHub(SystemClock())
    page = dict(samples(write_metrics(Metrics(), busy_status(), hub, running)))
    name = "mlx_isolate_requests_in_flight"
    shown = {labels: value for (sample, labels), value in page.items() if sample == name}
    assert len(shown) == MODEL_LABELS_MAX + 1
    assert shown[(("model", OTHER),)] == 5
    assert sum(shown.values()) == len(running)
