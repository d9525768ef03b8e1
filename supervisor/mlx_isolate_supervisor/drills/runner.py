"""Runs drills one after another, each as often as asked, and judges what they share."""

import contextlib
import statistics
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

import aiohttp
import psutil

from mlx_isolate_supervisor.drills.bounds import MEDIAN_SAMPLES_MIN
from mlx_isolate_supervisor.drills.catalogue import Drill
from mlx_isolate_supervisor.drills.record import (
    Broken,
    CannotRun,
    DrillReport,
    Record,
    reason_of,
)
from mlx_isolate_supervisor.drills.stage import Stage, StagePlan


async def run_drills(
    drills: Sequence[Drill],
    plan: StagePlan,
    repeat: int = 1,
    begun: Callable[[Drill, int], None] | None = None,
) -> AsyncGenerator[DrillReport]:
    """Do each drill `repeat` times; a report for each time, as soon as there is one.

    Args:
        drills: what to do.
        plan: on which daemons.
        repeat: how often.
        begun: told of each time before it begins.
    """
    stage = Stage(plan)
    try:
        for drill in drills:
            done: list[DrillReport] = []
            for number in range(1, repeat + 1):
                if begun is not None:
                    begun(drill, number)
                done.append(await _run_one(drill, stage, number))
                yield done[-1]
                if done[-1].result == "not_run":
                    # What cannot be done here cannot be done here the next time either.
                    break
            if drill.judges_median and (median := _median_report(drill, done)) is not None:
                yield median
    finally:
        await stage.close()


async def _run_one(drill: Drill, stage: Stage, number: int) -> DrillReport:
    record = Record(drill.name, number)
    try:
        # Opening and closing may fail like the drill itself; the next one has its turn all the same.
        with _breaking(record):
            async with stage.open(drill, record) as scene:
                with _breaking(record):
                    await drill.run(scene)
                prober = scene.prober
                record.within("supervisor_answer", prober.worst_s, prober.failure or "")
                record.facts["supervisor_worst_s"] = round(prober.worst_s, 4)
                record.facts["supervisor_probes"] = prober.count
    except CannotRun as error:
        return record.report(str(error))
    return record.report()


@contextlib.contextmanager
def _breaking(record: Record) -> Generator[None]:
    """What ends this early is a broken promise of the record."""
    try:
        yield
    except Broken as error:
        record.broken(error)
    except (aiohttp.ClientError, OSError, psutil.Error) as error:
        record.broken(Broken("served", f"the daemon does not answer: {reason_of(error)}"))


def _median_report(drill: Drill, done: Sequence[DrillReport]) -> DrillReport | None:
    """What only many repetitions can tell."""
    samples = [report.facts["respawn_s"] for report in done if "respawn_s" in report.facts]
    figures = [float(value) for value in samples if value is not None]
    if len(figures) < MEDIAN_SAMPLES_MIN:
        return None
    record = Record(drill.name, 0)
    record.daemon, record.is_own = done[0].daemon, done[0].is_own
    record.within("respawn_median", statistics.median(figures), f"of {len(figures)}")
    return record.report()
