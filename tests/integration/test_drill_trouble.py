"""Drills on a daemon that is in trouble already: each has its verdict, and the next its turn."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import msgspec
import psutil
import pytest
from aiohttp import web

from mlx_isolate_supervisor.drills import traffic
from mlx_isolate_supervisor.drills.catalogue import DRILLS
from mlx_isolate_supervisor.drills.processes import end
from mlx_isolate_supervisor.drills.record import DrillReport
from mlx_isolate_supervisor.drills.runner import run_drills
from mlx_isolate_supervisor.drills.stage import RunningDaemon, StagePlan
from tests.fakes.statuses import ready_status, status

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def no_requests(request: web.Request) -> web.Response:
    return web.json_response({"requests": []})


async def one_ready_model(request: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(status(ready_status())))


async def refuse(request: web.Request) -> web.Response:
    return web.Response(status=503)


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def say_nothing(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


def drilled(status_page: Handler, events_page: Handler) -> list[DrillReport]:
    """What two drills in a row report of a daemon with these pages."""

    async def run() -> list[DrillReport]:
        app = web.Application()
        app.router.add_get("/v1/requests", no_requests)
        app.router.add_get("/status", status_page)
        app.router.add_get("/events", events_page)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            plan = StagePlan(running=RunningDaemon(url=url), own=None, consent=lambda _: True)
            drills = [DRILLS["kill"], DRILLS["reload"]]
            return [report async for report in run_drills(drills, plan)]
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status_page", "events_page", "told"),
    [
        pytest.param(one_ready_model, refuse, "503", id="no event stream"),
        pytest.param(hang_up, refuse, "disconnected", id="no status"),
        pytest.param(say_nothing, refuse, "TimeoutError", id="a status that does not come"),
    ],
)
def test_a_daemon_that_cannot_be_watched_breaks_the_drill(
    status_page: Handler, events_page: Handler, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "PAGE_DEADLINE_S", 0.2)
    reports = drilled(status_page, events_page)
    assert [report.result for report in reports] == ["broken", "broken"]
    for report in reports:
        [verdict] = report.verdicts
        assert verdict.promise == "served"
        assert told in verdict.detail


def test_a_process_that_has_gone_meanwhile_is_ended_without_a_word() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
        child.wait(10)
    end(process)
