"""The watchdog's verdicts, as a table over time."""

import pytest

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.slots.watchdog import (
    begin_load,
    begin_service,
    hear_loading,
    hear_progress,
    look,
    look_at_load,
)

SETTINGS = SlotSettings(watchdog_interval_s=0.5)
# Far from zero, as on a machine that has run for long; halves of seconds are exact there.
BEGAN = 1e6


def serve(
    seconds: int,
    *,
    active: int = 0,
    held: int = 0,
    tokens_per_s: int = 0,
    silent: bool = False,
    settings: SlotSettings = SETTINGS,
) -> float | None:
    """Let an engine live for so long; the time of the verdict, if one falls."""
    pulse = begin_service(BEGAN)
    for tick in range(1, 2 * seconds + 1):
        now = tick / 2
        if not silent:
            line = wire.Progress(active=active, prompt_tokens=int(now * tokens_per_s))
            pulse = hear_progress(pulse, line, BEGAN + now)
        pulse, verdict = look(pulse, BEGAN + now, held=held, settings=settings)
        if verdict is not None:
            return now
    return None


def test_an_idle_engine_is_never_hung() -> None:
    assert serve(7200) is None


def test_busy_without_progress_is_hung_after_the_timeout() -> None:
    # Its first line, at half a second, is the last that moved; sixty seconds are still allowed.
    assert serve(120, active=1, held=1) == 61.0


def test_a_prefill_longer_than_the_timeout_is_not_hung() -> None:
    assert serve(600, active=1, held=1, tokens_per_s=1) is None


def test_a_silent_engine_is_hung_after_the_report_silence() -> None:
    assert serve(60, silent=True) == 10.5


def test_an_engine_that_denies_its_requests_gets_the_stall_timeout_more() -> None:
    assert serve(300, held=1) == 121.0


def test_zero_switches_each_watchdog_off() -> None:
    off = SlotSettings(watchdog_timeout_s=0.0)
    assert serve(600, active=1, held=1, settings=off) is None
    off = SlotSettings(report_silence_s=0.0)
    assert serve(600, silent=True, settings=off) is None


def test_a_late_watchdog_blames_nobody() -> None:
    pulse = begin_service(BEGAN)
    pulse = hear_progress(pulse, wire.Progress(active=1), BEGAN + 0.5)
    pulse, verdict = look(pulse, BEGAN + 3600.0, held=1, settings=SETTINGS)
    assert verdict is None
    pulse, verdict = look(pulse, BEGAN + 3600.5, held=1, settings=SETTINGS)
    assert verdict is None


@pytest.mark.parametrize("interval_s", [0.5, 0.25])
@pytest.mark.parametrize(("intervals", "is_late"), [(4, False), (5, True)])
def test_a_watchdog_is_late_after_more_than_four_of_its_intervals(
    interval_s: float, intervals: int, is_late: bool
) -> None:
    settings = SlotSettings(watchdog_interval_s=interval_s, start_silence_s=10.0)
    pulse, loading = begin_service(BEGAN), begin_load(BEGAN)
    for tick in range(1, int(10.0 / interval_s) + 1):
        now = BEGAN + tick * interval_s
        pulse, verdict = look(pulse, now, held=0, settings=settings)
        loading, of_load = look_at_load(loading, now, settings)
        assert verdict is None and of_load is None
    now = BEGAN + 10.0 + intervals * interval_s
    assert (look(pulse, now, held=0, settings=settings)[1] is None) is is_late
    assert (look_at_load(loading, now, settings)[1] is None) is is_late


def test_work_that_begins_after_a_long_idle_time_has_the_whole_timeout() -> None:
    pulse = begin_service(BEGAN)
    for tick in range(1, 400):
        now = tick / 2
        active = 1 if now >= 150 else 0
        pulse = hear_progress(pulse, wire.Progress(active=active), BEGAN + now)
        pulse, verdict = look(pulse, BEGAN + now, held=active, settings=SETTINGS)
        assert verdict is None, now


def load(seconds: int, *, stage: str | None, download_s: int = 0) -> float | None:
    """Let a load run for so long, after a download; the time of the verdict, if one falls."""
    pulse = begin_load(BEGAN)
    for tick in range(1, 2 * (seconds + download_s) + 1):
        now = tick / 2
        if now <= download_s:
            pulse = hear_loading(pulse, wire.Loading(stage="download"), BEGAN + now)
        elif stage is not None:
            pulse = hear_loading(pulse, wire.Loading(stage=stage), BEGAN + now)
        pulse, verdict = look_at_load(pulse, BEGAN + now, SETTINGS)
        if verdict is not None:
            return now
    return None


def test_a_load_without_a_word_fails_after_two_minutes() -> None:
    assert load(300, stage=None) == 120.5


def test_a_slow_load_that_progresses_is_left_alone() -> None:
    assert load(1700, stage="weights") is None


def test_a_load_that_progresses_for_ever_ends_after_half_an_hour() -> None:
    assert load(3000, stage="weights") == 1800.5


def test_a_download_is_not_counted() -> None:
    assert load(1700, stage="weights", download_s=7200) is None
    # From its first line to the first of what follows: 7200 s of the 7200.5 before that.
    assert load(3000, stage="weights", download_s=7200) == 9000.5


def test_a_download_that_stands_still_fails() -> None:
    pulse = hear_loading(begin_load(BEGAN), wire.Loading(stage="download"), BEGAN)
    pulse, verdict = look_at_load(pulse, BEGAN + 1.0, SETTINGS)
    for tick in range(4, 300):
        pulse, verdict = look_at_load(pulse, BEGAN + tick / 2, SETTINGS)
    assert verdict == "the load made no progress for 120 s"


@pytest.mark.parametrize("at", [200.0, 5000.0])
def test_a_late_watchdog_does_not_fail_a_load(at: float) -> None:
    settings = SlotSettings(start_after_download_s=0.0)
    assert look_at_load(begin_load(BEGAN), BEGAN + at, settings)[1] is None
