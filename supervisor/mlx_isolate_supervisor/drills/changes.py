"""Drills in which a healthy engine is replaced while requests run: a reload, a switch of models."""

import asyncio

from mlx_isolate_supervisor.drills.polling import poll
from mlx_isolate_supervisor.drills.record import Broken
from mlx_isolate_supervisor.drills.scene import LOAD_DEADLINE_S, Scene
from mlx_isolate_supervisor.drills.traffic import Seen

STREAMS = 4
TOKENS = 48
# The stream that a switch must not cut.
SWITCH_TOKENS = 96


async def reload(scene: Scene) -> None:
    """Reload the model under steady streams: none fails, and another process serves."""
    before = await scene.model()
    supervisor = (await scene.status()).supervisor.pid
    seen: list[Seen] = []
    over = asyncio.Event()

    async def ask_on() -> None:
        while not over.is_set():
            one, task = scene.client.begin(scene.model_id, TOKENS)
            seen.append(one)
            await task

    clients = [asyncio.create_task(ask_on()) for _ in range(STREAMS)]
    try:
        await scene.wait(
            "served", "a stream begins", poll(lambda: any(one.begun.is_set() for one in seen))
        )
        scene.act(f"reload of {scene.model_id}, {STREAMS} streams run all the time")
        code, answer = await scene.wait(
            "served",
            "the reload",
            scene.client.post("/models/reload", {"model": scene.model_id}),
            LOAD_DEADLINE_S,
        )
        scene.mark(f"the reload has its outcome: {code}")
        after = await scene.until("served", "ready", lambda m: m.state == "ready")
        if code != 200 or after.pid == before.pid:
            raise Broken("pid_changed", f"{code} {answer}")
        # What the new engine answers is part of it.
        one, task = scene.client.begin(scene.model_id, TOKENS)
        seen.append(one)
        await scene.wait("served", "an answer of the new engine", task, LOAD_DEADLINE_S)
        if one.first_at is not None:
            scene.mark(
                f"first token of engine #{after.incarnation} (pid {after.pid})",
                scene.since(one.first_at),
            )
    finally:
        over.set()
    await scene.wait("uncut", "the streams end", asyncio.gather(*clients), LOAD_DEADLINE_S)
    scene.record.facts |= {
        "old_pid": before.pid,
        "new_pid": after.pid,
        "ready_s": round(scene.since(), 4),
        "requests": len(seen),
    }
    whole = sum(each.is_complete for each in seen)
    scene.mark(f"{len(seen)} streams, {len(seen) - whole} failed or cut")
    scene.judge_complete("uncut", *seen)
    scene.judge_replaced(before, after)
    scene.judge_complete("served", one)
    same = (await scene.status()).supervisor.pid == supervisor
    scene.record.that("supervisor_stays", same)


async def swap(scene: Scene) -> None:
    """Ask for a second model where only one may be loaded, while the first one streams."""
    status = await scene.status()
    names = [model.id for model in status.models]
    first, second = scene.model_id, next(name for name in names if name != scene.model_id)
    before = await scene.model()
    [stream] = await scene.streams(1, SWITCH_TOKENS)
    scene.act(f"{second} is asked for while {first} streams; one model may be loaded")
    other, task = scene.client.begin(second, 8)
    await scene.ended("uncut", [stream])
    scene.mark(f"the stream of {first} has ended: {stream!r}", scene.since(stream.ended_at))
    scene.judge_complete("uncut", stream)
    await scene.wait("served", f"an answer of {second}", task, LOAD_DEADLINE_S)
    scene.mark(f"{second} has answered: {other!r}", scene.since(other.ended_at))
    serving = [model.id for model in (await scene.status()).models if model.state == "ready"]
    scene.record.that("one_at_a_time", len(serving) <= 1, ", ".join(serving))
    back = await scene.answer(f"an answer of {first}")
    scene.mark(f"{first} has answered again: {back!r}")
    after = await scene.model()
    scene.judge_complete("served", other, back)
    scene.record.facts |= {"old_pid": before.pid, "new_pid": after.pid}
    scene.judge_replaced(before, after)
