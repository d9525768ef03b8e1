"""/metrics against a harness that counts for itself: 200 mixed requests with kills and aborts."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.architecture.generated import ROOT
from tests.running_daemon import RunningDaemon, fake_model, read_until
from tests.waiting import wait_for

REQUESTS = 200
THREADS = 6
KILL_EVERY = 40
ROW = re.compile(r"^\| `(mlx_isolate_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
# Shown only where there is something to tell.
SOMETIMES = {"mlx_isolate_request_errors_total", "mlx_isolate_engine_restarts_total"}


class Harness:
    """Sends requests and notes how each ended, as a client sees it."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.codes: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.scrapes: list[Scrape] = []
        self._lock = threading.Lock()

    def note(self, model: str, outcome: str, code: str | None = None) -> None:
        with self._lock:
            self.outcomes[model, outcome] += 1
            if code is not None:
                self.codes[model, code] += 1

    def plain(self, model: str, **fake: Any) -> None:
        answer = self.daemon.chat(model, fake=fake)
        if answer.status == 200:
            self.note(model, "answered")
            with self._lock:
                self.bytes[model] += len(answer.body)
            return
        error = answer.json()["error"]
        outcome = "failed" if answer.status in (500, 502, 504) else "rejected"
        # An engine's own refusal passes through and is counted by its status.
        code = f"http_{answer.status}" if error["code"] == "fake" else error["code"]
        self.note("" if answer.status == 404 else model, outcome, code)

    def stream(self, model: str, **fake: Any) -> None:
        answer = self.daemon.chat(model, stream=True, fake=fake)
        raw, status = answer.body, answer.status
        found = re.search(rb'"code"\s*:\s*"(\w+)"', raw)
        if status == 200 and b"[DONE]" in raw:
            self.note(model, "answered")
            with self._lock:
                self.events[model] += raw.count(b"data: ")
        elif found is not None:
            outcome = "failed" if status in (200, 502, 504) else "rejected"
            self.note(model, outcome, found[1].decode())
        else:
            raise AssertionError(f"no outcome in {raw[-300:]!r}")

    def abort(self, model: str) -> None:
        client = self.daemon.stream(model=model, fake={"chunks": 500, "interval_s": 0.01})
        with client:
            read_until(client, b"data: ")
        self.note(model, "cancelled")

    def one(self, number: int) -> None:
        """The number-th request of the mix."""
        if number % KILL_EVERY == KILL_EVERY - 1:
            self.stream("victim", chunks=5, after=2, die="SIGKILL")
            scrape = Scrape(self.daemon)
            with self._lock:
                self.scrapes.append(scrape)
        elif number % 8 == 0:
            self.stream("victim", chunks=4)
        elif number % 8 == 1:
            self.plain("victim")
        elif number % 8 == 2:
            self.abort("calm")
        elif number % 8 == 3:
            self.plain("nosuch")
        elif number % 8 == 4:
            self.plain("calm", status=400)
        elif number % 8 == 5:
            self.plain("steady")
        else:
            self.stream("steady", chunks=7, interval_s=0.002)


class Scrape:
    """One answer of /metrics."""

    def __init__(self, daemon: RunningDaemon) -> None:
        answer = daemon.ask("GET", "/metrics")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        self.families = {
            family.name + ("_total" if family.type == "counter" else ""): family
            for family in text_string_to_metric_families(answer.body.decode())
        }

    def samples(self) -> Iterator[Sample]:
        for family in self.families.values():
            yield from family.samples

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Harness, Scrape, Scrape]]:
    """The harness's count, and /metrics before and after."""
    home = tmp_path_factory.mktemp("metrics")
    models = [str(fake_model(home / name)) for name in ("victim", "calm", "steady")]
    with RunningDaemon(home / "home", *models) as daemon:
        for number in range(len(models)):
            daemon.wait_state("ready", number)
        harness = Harness(daemon)
        before = Scrape(daemon)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(harness.one, range(REQUESTS)))
        daemon.wait_state("ready", 0, 20.0)

        def settled() -> Scrape | None:
            scrape = Scrape(daemon)
            steady = {"model": "steady"}
            done = scrape.value("mlx_isolate_requests_total") >= REQUESTS and (
                scrape.value("mlx_isolate_generated_tokens_total", **steady)
                >= scrape.value("mlx_isolate_engine_completions_total", **steady)
                >= harness.outcomes["steady", "answered"]
            )
            return scrape if done else None

        after = wait_for(settled, 15.0, "all requests counted")
        assert after is not None
        yield harness, before, after


Measured = tuple[Harness, Scrape, Scrape]


def test_outcomes_agree_with_the_harness(measured: Measured) -> None:
    harness, _, after = measured
    assert sum(harness.outcomes.values()) == REQUESTS
    assert after.value("mlx_isolate_requests_total") == REQUESTS
    for model in ("victim", "calm", "steady", ""):
        for outcome in ("answered", "rejected", "failed", "cancelled"):
            counted = after.value("mlx_isolate_requests_total", model=model, outcome=outcome)
            assert counted == harness.outcomes[model, outcome], (model, outcome)


def test_errors_agree_by_code(measured: Measured) -> None:
    harness, _, after = measured
    assert harness.codes["victim", "engine_died"] >= REQUESTS // KILL_EVERY
    for (model, code), count in harness.codes.items():
        counted = after.value("mlx_isolate_request_errors_total", model=model, code=code)
        assert counted == count, (model, code)


def test_aborts_are_cancelled_while_streaming(measured: Measured) -> None:
    harness, _, after = measured
    aborted = harness.outcomes["calm", "cancelled"]
    assert aborted > 0
    assert after.value("mlx_isolate_requests_cancelled_total") == aborted
    assert after.value("mlx_isolate_requests_cancelled_total", phase="streaming") == aborted


def test_nothing_is_in_flight_when_all_is_done(measured: Measured) -> None:
    _, _, after = measured
    assert after.value("mlx_isolate_requests_in_flight") == 0
    assert after.value("mlx_isolate_requests_active") == 0
    assert after.value("mlx_isolate_requests_queued") == 0


def test_histograms_count_what_they_say(measured: Measured) -> None:
    harness, _, after = measured
    steady = {"model": "steady"}
    answered = harness.outcomes["steady", "answered"]
    streams = REQUESTS // 8 * 2 - REQUESTS // KILL_EVERY  # two of eight, less the kills' turns
    assert after.value("mlx_isolate_request_duration_seconds_count") == REQUESTS
    assert after.value("mlx_isolate_request_queue_seconds_count", **steady) == answered
    assert after.value("mlx_isolate_time_to_first_token_seconds_count", **steady) == streams
    gaps = harness.events["steady"] - streams
    assert after.value("mlx_isolate_inter_token_seconds_count", **steady) == gaps
    first = after.value("mlx_isolate_time_to_first_token_seconds_sum", **steady)
    assert 0 < first <= after.value("mlx_isolate_request_duration_seconds_sum", **steady)


def test_relay_counts_events_and_bytes(measured: Measured) -> None:
    harness, _, after = measured
    steady = {"model": "steady"}
    plain = harness.outcomes["steady", "answered"] - after.value(
        "mlx_isolate_time_to_first_token_seconds_count", **steady
    )
    events = after.value("mlx_isolate_relay_events_total", **steady)
    assert harness.events["steady"] <= events <= harness.events["steady"] + plain
    assert after.value("mlx_isolate_relay_sent_bytes_total", **steady) > harness.bytes["steady"]
    assert after.value("mlx_isolate_relay_received_bytes_total", **steady) > 0


def test_tokens_and_completions_are_the_engines_own(measured: Measured) -> None:
    harness, _, after = measured
    steady = {"model": "steady"}
    answered = harness.outcomes["steady", "answered"]
    completed = after.value("mlx_isolate_engine_completions_total", end="completed", **steady)
    assert completed == answered
    streams = after.value("mlx_isolate_time_to_first_token_seconds_count", **steady)
    tokens = 7 * streams + 5 * (answered - streams)
    assert after.value("mlx_isolate_generated_tokens_total", **steady) == tokens
    assert after.value("mlx_isolate_prompt_tokens_total", **steady) == 5 * answered


def test_restarts_are_counted_by_cause_and_show_in_the_state(measured: Measured) -> None:
    harness, _, after = measured
    victim = {"model": "victim"}
    incarnation = after.value("mlx_isolate_engine_incarnation", **victim)
    restarts = after.value("mlx_isolate_engine_restarts_total", **victim)
    assert 1 <= restarts <= REQUESTS // KILL_EVERY
    assert restarts == after.value("mlx_isolate_engine_restarts_total", cause="signal", **victim)
    assert incarnation == restarts + 1
    assert after.value("mlx_isolate_engine_state", state="ready", **victim) == 1
    assert after.value("mlx_isolate_engine_state", **victim) == 1
    assert harness.daemon.status()["models"][0]["restarts"] == restarts


def test_every_documented_metric_is_there_and_no_other(measured: Measured) -> None:
    _, before, after = measured
    page = (ROOT / "docs/observability.md").read_text()
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(page)
    }
    assert documented.keys() == after.families.keys()
    assert documented.keys() - before.families.keys() <= SOMETIMES
    for name, (kind, labels) in documented.items():
        family = after.families[name]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels, name


def test_a_scrape_beside_a_kill_is_whole(measured: Measured) -> None:
    harness, _, after = measured
    assert len(harness.scrapes) == REQUESTS // KILL_EVERY
    for scrape in harness.scrapes:
        assert after.families.keys() - scrape.families.keys() <= SOMETIMES
        assert scrape.value("mlx_isolate_engine_state", model="victim") == 1
        for sample in scrape.samples():
            if sample.name.endswith(("_total", "_count", "_bucket")):
                assert sample.value <= after.value(sample.name, **sample.labels), sample


def test_counters_never_fall_and_no_label_grows_with_requests(measured: Measured) -> None:
    harness, before, after = measured
    old = {(s.name, json.dumps(s.labels, sort_keys=True)): s.value for s in before.samples()}
    for sample in after.samples():
        key = (sample.name, json.dumps(sample.labels, sort_keys=True))
        if sample.name.endswith(("_total", "_count", "_sum", "_bucket")):
            assert sample.value >= old.get(key, 0.0), key
        assert not any(value.startswith("req-") for value in sample.labels.values())
    assert len(list(after.samples())) < 600
    assert harness.daemon.process.poll() is None


def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "h", str(fake_model(tmp_path / "m")), "--no-metrics") as daemon:
        assert daemon.ask("GET", "/metrics").status == 404
