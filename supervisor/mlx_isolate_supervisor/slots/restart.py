"""Whether and when an engine that ended is followed by another: backoff and circuit breaker.

Pure: takes `now`, a budget and a random number, returns a judgement. Two separate counts: the
delay grows with the crashes of the last minute, whatever they completed; the circuit opens by
incarnations in a row that died without completing one completion.
"""

import msgspec

from mlx_isolate_shared.config import EXIT_CANNOT_WORK
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings


class RestartBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of the past.

    Attributes:
        crashes: times of crashes within the window, oldest first.
        streak: incarnations in a row that died before they completed one completion.
    """

    crashes: tuple[float, ...] = ()
    streak: int = 0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an incarnation ended.

    Attributes:
        wanted: another one is wanted.
        planned: it was asked to end (unload, reload, shutdown), so its end is no crash.
        code: exit code, None after a signal.
        completed: it completed at least one completion.
    """

    wanted: bool
    planned: bool
    code: int | None
    completed: bool


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The lifecycle event that an ending amounts to, and the delay of the next try if one is due."""

    event: Event
    budget: RestartBudget
    delay_s: float | None = None


def after_completion(budget: RestartBudget) -> RestartBudget:
    """One completed completion ends the streak; the crashes of the last minute stay."""
    return RestartBudget(crashes=budget.crashes) if budget.streak else budget


def respawn_delay_s(settings: RestartSettings, crashes: int, jitter: float) -> float:
    """Delay after the given number (>= 1) of crashes within the window; `jitter` in -1..1."""
    delay = settings.delays_s[min(crashes, len(settings.delays_s)) - 1]
    return delay * (1.0 + settings.jitter * jitter)


def half_open_delay_s(settings: RestartSettings, streak: int) -> float:
    """Pause before the next half-open try; `streak` >= streak_max."""
    doublings = min(streak - settings.streak_max, 32)
    return min(settings.half_open_s * 2.0**doublings, settings.half_open_max_s)


def judge(
    ending: Ending, budget: RestartBudget, *, now: float, jitter: float, settings: RestartSettings
) -> Judgement:
    """What an ending means.

    Args:
        now: monotonic seconds.
        jitter: a random number in -1..1.
    """
    if not ending.wanted:
        return Judgement(event=Event.EXITED, budget=budget)
    if ending.code == EXIT_CANNOT_WORK:
        return Judgement(event=Event.CANNOT_WORK, budget=budget)
    if ending.planned:
        return Judgement(event=Event.LOST, budget=budget, delay_s=0.0)
    recent = tuple(at for at in budget.crashes if now - at < settings.window_s)
    # More than the delays can tell apart need not be kept.
    recent = (*recent, now)[-len(settings.delays_s) :]
    streak = 0 if ending.completed else budget.streak + 1
    budget = RestartBudget(crashes=recent, streak=streak)
    if streak >= settings.streak_max:
        delay = half_open_delay_s(settings, streak)
        return Judgement(event=Event.CIRCUIT_OPENED, budget=budget, delay_s=delay)
    delay = respawn_delay_s(settings, len(recent), jitter)
    return Judgement(event=Event.LOST, budget=budget, delay_s=delay)
