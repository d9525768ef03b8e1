"""The figures of the relay's bench, beside their bounds: the table that is printed."""

import re
import statistics
import subprocess

import msgspec

from bench.machine import machine
from bench.relay_rivals import find_program

RIVALS = ("nginx", "haproxy")
# CPU time per event, as a multiple of nginx's.
CPU_RATIO_MAX = 1.15


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured.

    Attributes:
        rounds: turns that each rival takes.
        stream_s: length of one stream.
        rates: events a second of each stream, by the number of streams.
        event_bytes: size of an event.
        idle_s: how long nothing is done, to learn what a rival spends on nothing.
        pause_s: between two requests, so that none pays for the accounting of the last.
        requests: small requests, and first tokens, of one turn.
    """

    rounds: int = 9
    stream_s: float = 1.5
    rates: dict[int, float] = msgspec.field(default_factory=lambda: {1: 200.0, 16: 60.0, 64: 20.0})
    event_bytes: int = 200
    idle_s: float = 5.0
    pause_s: float = 0.002
    requests: int = 150


SMALL = Sizes(rounds=1, stream_s=0.3, idle_s=1.0, requests=20)


class Reading(msgspec.Struct, kw_only=True):
    """What one rival was measured at, one value a turn.

    Attributes:
        idle_ms_per_s: CPU time while nothing is asked of it (the daemon's own housekeeping).
        cpu_us: CPU time of the rival per event above its idle time, by the number of streams.
        request_ms: median of small requests, sequential on one connection.
        first_ms: median time to first event.
        rate: events a second that the client saw, of one stream.
        reads_per_event: reads of the client's socket per event, one stream.
    """

    idle_ms_per_s: float = 0.0
    cpu_us: dict[int, list[float]] = {}
    request_ms: list[float] = []
    first_ms: list[float] = []
    rate: list[float] = []
    reads_per_event: list[float] = []


class Row(msgspec.Struct, kw_only=True):
    """One line of the table; `holds` is None where there is no bound, or nothing to compare."""

    name: str
    value: str
    rivals: list[str] = []
    bound: str | None = None
    holds: bool | None = None

    @classmethod
    def of(cls, name: str, own: list[float], rivals: list[list[float]]) -> "Row":
        """Median and spread of all."""
        return cls(name=name, value=spread(own), rivals=[spread(values) for values in rivals])

    @classmethod
    def bounded(
        cls,
        name: str,
        value: float | None,
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> "Row":
        """One figure and what it must not pass."""
        if value is None:
            return cls(name=name, value="-", bound="nothing to compare")
        bound = f"≥ {least}" if least is not None else f"≤ {most}" if most is not None else ""
        row = cls(name=name, value=f"{value:.3f}", bound=bound)
        if bound:
            row.holds = (least is None or value >= least) and (most is None or value <= most)
        return row


def spread(values: list[float]) -> str:
    """Median, lowest and highest."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3f} ({min(values):.3f} – {max(values):.3f})"


class Result(msgspec.Struct, kw_only=True):
    """Everything that one run found."""

    machine: dict[str, str]
    sizes: Sizes
    readings: dict[str, Reading]
    pages_ms: list[float] = []
    start_s: list[float] = []
    idle_memory_bytes: int = 0
    rows: list[Row] = []


def facts() -> dict[str, str]:
    """The machine, and the versions of what ran, rivals included."""
    return machine("aiohttp", "uvloop") | {name: _version(name) for name in RIVALS}


def _version(name: str) -> str:
    program = find_program(name)
    if program is None:
        return "not installed"
    shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
    found = re.search(r"\d+\.\d+\.\d+", shown.stdout + shown.stderr)
    return "unknown" if found is None else found[0]


def _cpu_rows(result: Result) -> list[Row]:
    relay = result.readings["relay"]
    rows: list[Row] = []
    for streams, own in relay.cpu_us.items():
        label = f"CPU per event, {streams} stream{'s' if streams > 1 else ''}"
        rivals = {
            name: result.readings[name].cpu_us[streams] if name in result.readings else []
            for name in RIVALS
        }
        rows.append(Row.of(f"{label}, µs", own, list(rivals.values())))
        for name, values in rivals.items():
            # They take turns within seconds, so what else the machine does is the same for all.
            ratios = [a / b for a, b in zip(own, values, strict=False)]
            ratio = statistics.median(ratios) if ratios else None
            most = CPU_RATIO_MAX if name == "nginx" else None
            rows.append(Row.bounded(f"{label}, × {name}", ratio, most=most))
    return rows


def judge(result: Result) -> list[Row]:
    """Every figure beside its bound."""
    relay, direct = result.readings["relay"], result.readings["direct"]
    rows = _cpu_rows(result)
    for name, field in (("small request", "request_ms"), ("first event", "first_ms")):
        own, base = getattr(relay, field), getattr(direct, field)
        rivals = [getattr(result.readings.get(rival, Reading()), field) for rival in RIVALS]
        rows.append(Row.of(f"{name} p50, ms (direct {statistics.median(base):.3f})", own, rivals))
        added = statistics.median(own) - statistics.median(base)
        rows.append(Row.bounded(f"{name} p50, added ms", added, most=0.5))
    ratio = statistics.median(relay.rate) / statistics.median(direct.rate)
    rows.append(Row.bounded("events/s, 1 stream, × direct", ratio, least=0.99))
    reads = statistics.median(relay.reads_per_event)
    rows.append(Row.bounded("reads per event, 1 stream", reads, least=0.95))
    pages = sorted(result.pages_ms)
    rows.append(Row.bounded("status page p50, 8 streams, ms", pages[len(pages) // 2]))
    page = pages[int(len(pages) * 0.99)]
    rows.append(Row.bounded("status page p99, 8 streams, ms", page, most=10.0))
    start = statistics.median(result.start_s)
    rows.append(Row.bounded("start to listening, s", start, most=0.7))
    rows.append(Row.bounded("idle CPU, ms/s", relay.idle_ms_per_s))
    memory = result.idle_memory_bytes / 1e6
    rows.append(Row.bounded("idle memory, MB", memory, most=60.0))
    return rows


def show(result: Result) -> str:
    """The table that a person reads."""
    lines = [f"{name:>8}: {value}" for name, value in result.machine.items()]
    lines.append(f"{'sizes':>8}: {msgspec.json.encode(result.sizes).decode()}")
    lines.append("")
    names = "".join(f"{name:<26}" for name in ("relay", *RIVALS))
    lines.append(f"{'median of the turns (lowest – highest)':<46}{names}".rstrip())
    for row in result.rows:
        verdict = "" if row.holds is None else "ok" if row.holds else "MISSED"
        beside = row.rivals if row.bound is None else [row.bound, verdict]
        lines.append(f"{row.name:<46}{row.value:<26}{''.join(f'{x:<26}' for x in beside)}".rstrip())
    return "\n".join(lines)
