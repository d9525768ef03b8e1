"""Drills' bounds, verdicts and pages, without a daemon."""

import os
import re

import pytest

from mlx_isolate_supervisor.drills.bounds import PROMISES
from mlx_isolate_supervisor.drills.catalogue import DRILLS
from mlx_isolate_supervisor.drills.pages import report_lines, summary_lines, verdict_line
from mlx_isolate_supervisor.drills.processes import child_of
from mlx_isolate_supervisor.drills.record import Broken, CannotRun, Record, overall
from mlx_isolate_supervisor.drills.scene import patience_s
from mlx_isolate_supervisor.drills.traffic import Seen
from mlx_isolate_supervisor.drills.watch import entered
from tests.architecture.generated import ROOT

ROW = re.compile(r"^\| `(\w+)` \| ([\d.]*) ?(\w*) \| (.*?) \| ", re.MULTILINE)


def test_documented_bounds_are_those_of_the_drills() -> None:
    page = (ROOT / "docs/behaviour.md").read_text().partition("\n## Bounds of the drills\n")[2]
    documented = {
        name: (float(limit) if limit else None, unit, text)
        for name, limit, unit, text in ROW.findall(page)
    }
    assert documented == {p.name: (p.limit, p.unit, p.text) for p in PROMISES.values()}


def test_operations_page_names_every_drill() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for drill in DRILLS.values():
        assert f"| `{drill.name}` |" in page


def test_a_measure_at_its_bound_is_kept_and_above_it_broken() -> None:
    record = Record("kill", 1)
    limit = PROMISES["told"].limit
    assert limit is not None
    record.within("told", limit)
    assert record.report().result == "kept"
    record.within("told", limit + 0.001, "late")
    report = record.report()
    assert report.result == "broken"
    assert [verdict.kept for verdict in report.verdicts] == [True, False]


def test_what_did_not_come_breaks_its_promise() -> None:
    record = Record("kill", 2)
    record.broken(Broken("served", "not within 30 s: an answer"))
    report = record.report()
    assert report.result == "broken"
    assert "BROKEN  served: the next request is answered: not within 30 s" in "\n".join(
        report_lines(report)
    )
    told = ["1 drill broke a promise", "kill #2 broke: served"]
    assert list(summary_lines([report])) == told


@pytest.mark.parametrize(
    ("measured_s", "may_take_s"), [(0.0, 30.0), (0.3, 30.0), (6.0, 30.0), (20.0, 100.0)]
)
def test_only_a_model_that_is_slow_by_its_own_measure_has_more_than_a_moment(
    measured_s: float, may_take_s: float
) -> None:
    assert patience_s(measured_s) == may_take_s


def test_a_drill_that_was_not_run_is_neither_kept_nor_broken() -> None:
    not_run = Record("oom", 1).report("only Linux can")
    assert not_run.result == "not_run"
    assert "could not be run: only Linux can" in "\n".join(report_lines(not_run))
    kept = Record("kill", 1).report()
    broken = Record("kill", 1)
    broken.that("served", False)
    assert overall([kept, kept]) == "kept"
    assert overall([kept, not_run]) == "not_run"
    assert overall([kept, not_run, broken.report()]) == "broken"


def test_timeline_is_in_order_of_time() -> None:
    record = Record("kill", 1)
    for at_s in (0.3, 0.1, 0.2):
        record.mark(at_s, f"at {at_s}")
    assert [mark.at_s for mark in record.report().timeline] == [0.1, 0.2, 0.3]


def test_a_verdict_shows_what_was_measured_and_allowed() -> None:
    record = Record("kill", 1)
    record.within("told", 0.25)
    assert verdict_line(record.report().verdicts[0]).startswith(
        "kept    told: 0.250 of at most 1 s"
    )


@pytest.mark.parametrize(
    "pid", [None, os.getpid(), os.getppid()], ids=["none", "ourselves", "our parent"]
)
def test_a_process_that_is_no_child_of_the_supervisor_is_never_signalled(pid: int | None) -> None:
    with pytest.raises(CannotRun):
        child_of(os.getpid(), pid)


def test_an_answer_is_complete_only_with_its_end() -> None:
    seen = Seen()
    seen.status = 200
    seen.read({"choices": [{"text": "a", "finish_reason": None}]})
    assert not seen.is_complete
    seen.done = True
    assert seen.is_complete
    seen.read({"error": {"code": "engine_died"}})
    assert not seen.is_complete
    assert seen.is_told


def test_an_event_of_an_earlier_engine_is_not_taken_for_that_of_the_next() -> None:
    wanted = entered("m", ("ready",), 2)
    event = {"model": "m", "before": "starting", "after": "ready", "incarnation": 1}
    assert not wanted(event)
    assert wanted(event | {"incarnation": 2})
    assert not wanted(event | {"incarnation": 2, "before": "ready"})
    assert not wanted(event | {"incarnation": 2, "model": "other"})
