"""The limits that a slot holds itself and its engines to."""

import msgspec

from mlx_isolate_supervisor.config import MemoryPolicy


class RestartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of respawning.

    Attributes:
        delays_s: delay before a respawn, by the number of crashes of the last `window_s` (the last
            one holds for all more); without it a crash loop eats a core.
        jitter: each delay is changed by up to this part of itself, so that several models that
            died together do not load together.
        streak_max: so many incarnations in a row that died without completing one completion
            open the circuit.
        half_open_s: pause before the first half-open try; doubles with every failed one.
        half_open_max_s: where the doubling ends.
    """

    delays_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
    window_s: float = 60.0
    jitter: float = 0.2
    streak_max: int = 5
    half_open_s: float = 30.0
    half_open_max_s: float = 600.0


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one slot, in seconds unless named otherwise. 0 switches a watchdog off.

    Attributes:
        queue_timeout_s: longest wait of a request for an engine with a free place.
        queued_requests_max: requests that wait at a time; one more is told 429.
        start_silence_s: a load that reports nothing for this long has failed.
        start_after_download_s: a load may take this long in all, downloads not counted.
        drain_timeout_s: what runs after an unload or reload was asked is cut after this.
        stop_window_s: from SIGTERM to SIGKILL; long, since a killed process with wired memory can
            leak it on macOS.
        abort_window_s: from SIGABRT (Python stacks into the log) to SIGKILL for a hung engine.
        watchdog_timeout_s: busy without a moving counter for this long is hung.
        report_silence_s: no report line for this long is hung.
        stall_timeout_s: how long an engine may wait for a client that does not read.
        watchdog_interval_s: how often the watchdog looks.
        memory_policy: on a reload, load the new engine beside the old one (`keep_then_commit`),
            or end the old one first (`evict_first`); `auto` goes by the memory that is free.
    """

    queue_timeout_s: float = 300.0
    queued_requests_max: int = 128
    start_silence_s: float = 120.0
    start_after_download_s: float = 1800.0
    drain_timeout_s: float = 600.0
    stop_window_s: float = 30.0
    abort_window_s: float = 2.0
    watchdog_timeout_s: float = 60.0
    report_silence_s: float = 10.0
    stall_timeout_s: float = 60.0
    watchdog_interval_s: float = 0.5
    memory_policy: MemoryPolicy = "auto"
    restart: RestartSettings = RestartSettings()
