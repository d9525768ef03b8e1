"""What a soak has measured, and whether it held what is promised; pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.soak_clients import Outcome
from bench.soak_plan import Plan

# An error that a client was told is explained by an act on its model within its lifetime, or so
# long before it: a stopped engine is known as hung after 10 s, and out of memory lasts a while.
EXPLAINED_S = 20.0
# A circuit that many deaths in a row have opened stays open for longer.
CIRCUIT_EXPLAINED_S = 90.0
# Rings and pools fill up at first; from the second third of a soak on nothing may grow.
GROWTH_MAX = {"memory_bytes": 6 << 20, "state_bytes": 6 << 20, "descriptors": 4}
# Below this length the first third is too short for what fills up once.
FLAT_FROM_S = 1200.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon at one moment.

    Attributes:
        memory_bytes: of the supervisor, PSS on Linux.
        sockets: files in the run directory.
        cache_bytes: the SSD tier on disk.
        state_bytes: everything else below the home but the log.
        log_bytes: the log with its older files.
        livez_s: how long /livez took.
    """

    at_s: float
    memory_bytes: int
    descriptors: int
    sockets: int
    cache_bytes: int
    state_bytes: int
    log_bytes: int
    livez_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One act or reload as it was done.

    Attributes:
        what: the death or the change.
        target: a model, or the standby.
        pid: of the process, None if there was none to act on.
    """

    at_s: float
    what: str
    target: str
    pid: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All of one soak."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    done: tuple[Done, ...]
    samples: tuple[Sample, ...]
    restarts: dict[str, int]
    endings: tuple[str, ...]


def slope_per_hour(samples: Sequence[Sample], name: str) -> float:
    """Least squares over the samples: units of the attribute an hour."""
    if len(samples) < 2:
        return 0.0
    times = [sample.at_s for sample in samples]
    values = [float(getattr(sample, name)) for sample in samples]
    return statistics.linear_regression(times, values).slope * 3600.0


def thirds(samples: Sequence[Sample]) -> tuple[Sequence[Sample], ...]:
    """The samples in three parts of equal number."""
    third = max(1, len(samples) // 3)
    return samples[:third], samples[third : 2 * third], samples[2 * third :]


def faults(record: Record) -> list[str]:
    """Every broken promise, one line each."""
    found = list(record.endings)
    for outcome in record.outcomes:
        if outcome.ending in ("wrong", "none", "torn"):
            found.append(f"{outcome.ending}: {outcome}")
        elif outcome.ending == "told" and not is_explained(outcome, record.done):
            found.append(f"an error without a cause: {outcome}")
    if not record.outcomes or len(record.outcomes) != len(record.plan.requests):
        found.append(f"{len(record.outcomes)} outcomes of {len(record.plan.requests)} requests")
    return found + _growth(record.samples, record.plan.duration_s)


def is_explained(outcome: Outcome, done: Sequence[Done]) -> bool:
    """Whether something was done to the client's model that it had to be told of."""
    before_s = CIRCUIT_EXPLAINED_S if outcome.code == "circuit_open" else EXPLAINED_S
    return any(
        act.target == outcome.request.model
        and act.pid is not None
        and outcome.began_s - before_s <= act.at_s <= outcome.ended_s
        for act in done
    )


def _growth(samples: Sequence[Sample], duration_s: float) -> list[str]:
    found: list[str] = []
    second, last = thirds(samples)[1:]
    if not last:
        return ["too few samples"]
    if duration_s < FLAT_FROM_S:
        return found
    # Medians: a sample taken just when all models are dead says nothing of what has grown.
    for name, most in GROWTH_MAX.items():
        before, after = (
            statistics.median(getattr(sample, name) for sample in part) for part in (second, last)
        )
        if after - before > most:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


def lines(record: Record) -> list[str]:
    """The record for a person."""
    plan, samples = record.plan, record.samples
    endings = Counter(outcome.ending for outcome in record.outcomes)
    codes = Counter(f"{one.status} {one.code}" for one in record.outcomes if one.ending == "told")
    kinds = Counter(one.request.kind for one in record.outcomes)
    acts = Counter(one.what for one in record.done if one.pid is not None)
    reloads = Counter(one.what for one in record.done if one.what.startswith("reload"))
    missed = len(record.done) - sum(acts.values()) - sum(reloads.values())
    second, last = thirds(samples)[1:]
    livez = sorted(sample.livez_s for sample in samples)
    text = [
        f"seed {plan.seed}, plan {plan.digest}, {plan.duration_s / 60:.0f} min",
        f"requests {len(record.outcomes)}: {_counted(kinds)}",
        f"outcomes: {_counted(endings)}",
        f"errors told: {_counted(codes)}",
        f"acts {sum(acts.values())} ({missed} found nobody): {_counted(acts)}",
        f"reloads {sum(reloads.values())}: {_counted(reloads)}",
        f"restarts: {_counted(record.restarts)}",
    ]
    for name, unit in (
        ("memory_bytes", 1 << 20),
        ("descriptors", 1),
        ("sockets", 1),
        ("cache_bytes", 1 << 20),
        ("state_bytes", 1 << 10),
        ("log_bytes", 1 << 10),
    ):
        values = [getattr(sample, name) / unit for sample in samples]
        tail = slope_per_hour([*second, *last], name) / unit
        text.append(
            f"{name} / {unit}: first {values[0]:.1f}, least {min(values):.1f}, "
            f"most {max(values):.1f}, last {values[-1]:.1f}; slope of the last two thirds "
            f"{tail:+.2f} an hour"
        )
    text.append(
        f"/livez: p50 {livez[len(livez) // 2] * 1000:.1f} ms, most {livez[-1] * 1000:.1f} ms"
    )
    return text


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"
