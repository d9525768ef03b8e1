"""Drills in which an engine has trouble to start: a slow load, and deaths again and again."""

import asyncio
import signal
import time

from mlx_isolate_supervisor.drills.processes import child_of, send, wake
from mlx_isolate_supervisor.drills.record import Broken
from mlx_isolate_supervisor.drills.scene import LOAD_DEADLINE_S, MOMENT_S, Scene
from mlx_isolate_supervisor.drills.traffic import Seen
from mlx_isolate_supervisor.telemetry.status import ModelStatus

# First requests that come at once.
FIRST_REQUESTS = 16
# How long the load is held up; far below --start-timeout, far above what a client would guess.
HELD_S = 2.0
# Deaths in a row that open the circuit, with their pauses of 0, 0.5, 1, 2 and 4 s.
DEATHS_MAX = 5
DEATHS_DEADLINE_S = 300.0
# After the circuit has opened nothing may be spawned for at least this long (its pause is 30 s).
QUIET_S = 3.0


async def slow_load(scene: Scene) -> None:
    """Unload, ask from many clients at once, and stop the loading engine for a while."""
    before = await scene.model()
    await scene.wait(
        "served",
        "the model is unloaded",
        scene.client.post("/models/unload", {"model": scene.model_id}),
        MOMENT_S * 4,
    )
    scene.act(f"{FIRST_REQUESTS} first requests at once")
    asked = [scene.client.begin(scene.model_id, 4) for _ in range(FIRST_REQUESTS)]
    starting = await scene.until(
        "served", "the engine starts", lambda m: m.state == "starting" and m.pid is not None
    )
    engine = child_of((await scene.status()).supervisor.pid, starting.pid)
    send(engine, signal.SIGSTOP)
    scene.mark(f"engine #{starting.incarnation} (pid {starting.pid}) is stopped in its load")
    try:
        await scene.until("served", "all of them wait", lambda m: m.queued == FIRST_REQUESTS)
        await asyncio.sleep(HELD_S)
        meanwhile = await scene.model()
    finally:
        wake(engine)
    scene.mark(f"it goes on; {meanwhile.queued} requests wait")
    seen = [one for one, _ in asked]
    last = await scene.ended("served", seen, LOAD_DEADLINE_S)
    scene.mark(f"{sum(one.is_complete for one in seen)} of {len(seen)} are answered", last)
    scene.judge_complete("served", *seen)
    after = await scene.model()
    scene.record.facts |= {
        "old_pid": before.pid,
        "new_pid": after.pid,
        "ready_s": after.load_s,
        "told_s": round(last, 4),
    }
    spawned = after.incarnation - before.incarnation
    scene.record.that("one_engine", spawned == 1, f"{spawned} were started")
    scene.judge_replaced(before, after)


async def crash_loop(scene: Scene) -> None:
    """Kill every new engine until the daemon gives up; then reset it."""
    first = await scene.model()
    supervisor = (await scene.status()).supervisor.pid
    scene.act(f"SIGKILL to engine #{first.incarnation} (pid {first.pid}) and to all that follow")
    deaths = await scene.wait(
        "spawns", "the circuit opens", _kill_all(scene, supervisor), DEATHS_DEADLINE_S
    )
    model = await scene.model()
    scene.mark(f"after {deaths} deaths: {model.failure and model.failure.message}")
    # The first one had completed requests, so its own death may or may not count.
    scene.record.facts |= {"old_pid": first.pid, "deaths": deaths}
    asked = time.monotonic()
    refused = await scene.wait("refusal", "a refusal", scene.client.answer(scene.model_id))
    scene.record.within("refusal", time.monotonic() - asked, f"{refused.status} {refused.code}")
    _check_refusal(scene, refused)
    await asyncio.sleep(QUIET_S)
    quiet = await scene.model()
    kept = deaths <= DEATHS_MAX + 1 and quiet.pid is None and quiet.incarnation == model.incarnation
    scene.record.that(
        "spawns", kept, f"{deaths} deaths, then engine #{quiet.incarnation} {quiet.state}"
    )
    await scene.reset(scene.model_id)
    scene.mark("reset")
    await scene.load()
    answer = await scene.answer("an answer after the reset")
    after = await scene.model()
    scene.record.facts["new_pid"] = after.pid
    scene.mark(f"engine #{after.incarnation} (pid {after.pid}) answers")
    scene.judge_replaced(first, after)
    scene.judge_complete("served", answer)


async def _kill_all(scene: Scene, supervisor: int) -> int:
    """Kill each engine of the model once, until it has failed; how many there were."""
    killed: set[int] = set()
    while True:
        model = await scene.model()
        if model.state == "failed":
            return len(killed)
        if model.incarnation not in killed and _is_up(model):
            send(child_of(supervisor, model.pid), signal.SIGKILL)
            killed.add(model.incarnation)
            scene.mark(f"engine #{model.incarnation} is killed, {model.state}")
        if len(killed) > DEATHS_MAX * 2:
            raise Broken("spawns", f"{len(killed)} engines were started one after another")
        await asyncio.sleep(0.01)


def _is_up(model: ModelStatus) -> bool:
    return model.pid is not None and model.state in ("starting", "ready")


def _check_refusal(scene: Scene, refused: Seen) -> None:
    scene.mark(f"a request is refused: {refused.status} {refused.code}")
    if refused.status != 503 or refused.retry_after is None:
        raise Broken("refusal", f"{refused!r}, Retry-After {refused.retry_after}")
