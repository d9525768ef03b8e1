"""Whether an engine is hung, by what it reported and what it holds: pure verdicts.

A load is held to the start limits, a ready engine to progress and report lines. A watchdog that
was itself late (a stopped or starved supervisor) blames nobody: it grants a fresh window.
"""

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings

# A look that comes later than this many intervals after the one before was late itself.
LATE_INTERVALS = 4.0

Counters = tuple[int, ...]


class LoadPulse(msgspec.Struct, frozen=True, kw_only=True):
    """A load under watch; times are monotonic seconds.

    Attributes:
        heard_at: when it last reported.
        download_s: time spent in finished downloads.
        downloading_since: when the running download began, None if none runs.
        looked_at: when the watchdog last looked.
    """

    began_at: float
    heard_at: float
    looked_at: float
    download_s: float = 0.0
    downloading_since: float | None = None


def begin_load(now: float) -> LoadPulse:
    """A load that starts now."""
    return LoadPulse(began_at=now, heard_at=now, looked_at=now)


def hear_loading(pulse: LoadPulse, loading: wire.Loading, now: float) -> LoadPulse:
    """A loading line came: any of them is progress."""
    since, total = pulse.downloading_since, pulse.download_s
    if loading.stage == "download":
        since = now if since is None else since
    elif since is not None:
        total += now - since
        since = None
    return msgspec.structs.replace(pulse, heard_at=now, download_s=total, downloading_since=since)


def look_at_load(
    pulse: LoadPulse, now: float, settings: SlotSettings
) -> tuple[LoadPulse, str | None]:
    """The verdict on a load, as a sentence why it has failed, or None."""
    if now - pulse.looked_at > LATE_INTERVALS * settings.watchdog_interval_s:
        pulse = msgspec.structs.replace(pulse, heard_at=now)
    pulse = msgspec.structs.replace(pulse, looked_at=now)
    silence, limit = now - pulse.heard_at, settings.start_silence_s
    if limit and silence > limit:
        return pulse, f"the load made no progress for {limit:g} s"
    running = 0.0 if pulse.downloading_since is None else now - pulse.downloading_since
    spent, limit = (
        now - pulse.began_at - pulse.download_s - running,
        settings.start_after_download_s,
    )
    if limit and spent > limit:
        return pulse, f"the load took longer than {limit:g} s"
    return pulse, None


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A ready engine under watch; times are monotonic seconds.

    Attributes:
        counters: those that move while an engine works.
        busy: it says that it has completions, running or queued.
        moved_at: when a counter last moved, or when it was last seen without work.
        heard_at: when it last reported.
        looked_at: when the watchdog last looked.
    """

    counters: Counters = ()
    busy: bool = False
    moved_at: float
    heard_at: float
    looked_at: float


def begin_service(now: float) -> Pulse:
    """An engine that is ready now."""
    return Pulse(moved_at=now, heard_at=now, looked_at=now)


def counters_of(progress: wire.Progress) -> Counters:
    """The counters of which at least one moves while an engine works."""
    return (
        progress.prompt_tokens,
        progress.generated_tokens,
        progress.completed,
        progress.cancelled,
        progress.failed,
        progress.stalled,
    )


def hear_progress(pulse: Pulse, progress: wire.Progress, now: float) -> Pulse:
    """A progress line came."""
    counters = counters_of(progress)
    return Pulse(
        counters=counters,
        busy=progress.active > 0 or progress.queued > 0,
        moved_at=pulse.moved_at if counters == pulse.counters else now,
        heard_at=now,
        looked_at=pulse.looked_at,
    )


def look(
    pulse: Pulse, now: float, *, held: int, settings: SlotSettings
) -> tuple[Pulse, str | None]:
    """The verdict on a ready engine, as a sentence why it is hung, or None.

    Args:
        held: requests that hold a place in it. An engine that calls itself idle while it holds
            requests is given `stall_timeout_s` more, since it may wait for a client that does not
            read, and cancels that one itself.
    """
    if now - pulse.looked_at > LATE_INTERVALS * settings.watchdog_interval_s:
        pulse = msgspec.structs.replace(pulse, heard_at=now, moved_at=now)
    pulse = msgspec.structs.replace(pulse, looked_at=now)
    if settings.report_silence_s and now - pulse.heard_at > settings.report_silence_s:
        return pulse, f"it reported nothing for {settings.report_silence_s:g} s"
    if not pulse.busy and not held:
        return msgspec.structs.replace(pulse, moved_at=now), None
    limit = settings.watchdog_timeout_s
    if limit and not pulse.busy:
        limit += settings.stall_timeout_s
    if limit and now - pulse.moved_at > limit:
        return pulse, f"it was busy for {limit:g} s without progress"
    return pulse, None
