"""Reports of drills as text for a person; pure."""

import statistics
from collections.abc import Iterator, Sequence

from mlx_isolate_supervisor.drills.bounds import PROMISES
from mlx_isolate_supervisor.drills.record import DrillReport, Verdict

# Figures of a summary, with what they are called there.
_FIGURES = {
    "detected_s": "noticed",
    "told_s": "clients told",
    "ready_s": "ready",
    "first_token_s": "first token",
    "respawn_s": "over the bare load",
    "supervisor_worst_s": "slowest /livez",
}


def report_lines(report: DrillReport) -> Iterator[str]:
    """One drill: where, its timeline, its verdicts."""
    number = f" #{report.number}" if report.number else ", all together"
    kind = "throw-away daemon" if report.is_own else "daemon"
    where = f", {kind} at {report.daemon}" if report.daemon else ""
    yield f"{report.drill}{number}{where}"
    for mark in report.timeline:
        yield f"  {_at(mark.at_s)}  {mark.text}"
    facts = report.facts
    if "supervisor_worst_s" in facts:
        cached = facts.get("cached_tokens")
        tail = "" if cached is None else f"; cached tokens afterwards: {cached}"
        worst_ms = float(facts["supervisor_worst_s"] or 0) * 1000
        yield f"            slowest /livez of {facts['supervisor_probes']}: {worst_ms:.1f} ms{tail}"
    for verdict in report.verdicts:
        yield "  " + verdict_line(verdict)
    if report.result == "not_run":
        yield f"  could not be run: {report.reason}"


def verdict_line(verdict: Verdict) -> str:
    """One verdict."""
    promise = PROMISES[verdict.promise]
    text = f"{'kept' if verdict.kept else 'BROKEN':6}  {verdict.promise}: "
    if verdict.measured is not None:
        text += f"{verdict.measured:.3f} of at most {verdict.limit:g} {promise.unit}, "
    text += promise.text
    if verdict.detail and not verdict.kept:
        text += f": {verdict.detail}"
    return text


def summary_lines(reports: Sequence[DrillReport]) -> Iterator[str]:
    """All drills: how many kept their promises, and the figures of those done several times."""
    by_drill: dict[str, list[DrillReport]] = {}
    for report in reports:
        if report.number:
            by_drill.setdefault(report.drill, []).append(report)
    for drill, done in by_drill.items():
        if len(done) > 1:
            yield f"{drill}: {_count(done)}"
            yield from _figure_lines(done)
    yield _count(list(reports))
    for report in reports:
        if report.result == "broken":
            names = ", ".join(verdict.promise for verdict in report.verdicts if not verdict.kept)
            yield f"{report.drill} #{report.number} broke: {names}"


def _count(done: Sequence[DrillReport]) -> str:
    counts = {
        "kept all promises": "kept",
        "broke a promise": "broken",
        "could not be run": "not_run",
    }
    numbers = {text: sum(r.result == result for r in done) for text, result in counts.items()}
    return ", ".join(
        f"{number} {'drill' if number == 1 else 'drills'} {text}"
        for text, number in numbers.items()
        if number
    )


def _figure_lines(done: Sequence[DrillReport]) -> Iterator[str]:
    for name, shown in _FIGURES.items():
        found = [report.facts[name] for report in done if name in report.facts]
        values = [float(value) for value in found if value is not None]
        if values:
            yield f"  {shown:20} median {statistics.median(values):8.3f} s, at most {max(values):.3f} s"


def _at(at_s: float | None) -> str:
    return " " * 8 if at_s is None else f"{at_s:8.3f}"
