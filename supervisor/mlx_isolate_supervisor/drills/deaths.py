"""Drills in which an engine dies: by a signal, or for want of memory."""

import signal

from mlx_isolate_supervisor.drills.bounds import PROMISES
from mlx_isolate_supervisor.drills.processes import Limit, child_of, send
from mlx_isolate_supervisor.drills.scene import LOAD_DEADLINE_S, MOMENT_S, Scene
from mlx_isolate_supervisor.drills.traffic import Seen
from mlx_isolate_supervisor.telemetry.status import ModelStatus

STREAMS = 4
# Beyond what an engine has mapped when its memory is limited: less than any next step needs.
OOM_SPARE_BYTES = 1 << 20
# A prompt whose processing needs memory that it does not have.
OOM_PROMPT = "All work and no play makes a long prompt. " * 400


async def die_by(scene: Scene, number: signal.Signals) -> None:
    """Signal a busy engine; its clients are told, and another takes over."""
    spares = await scene.standby_prepared()
    held = await scene.streams(STREAMS)
    before = await scene.model()
    supervisor = (await scene.status()).supervisor.pid
    engine = child_of(supervisor, before.pid)
    scene.record.facts |= {"signal": number.name, "old_pid": before.pid}
    scene.act(f"{number.name} to engine #{before.incarnation} (pid {before.pid})")
    send(engine, number)
    await follow_death(scene, before, held)
    await follow_return(scene, before, spares)


async def follow_death(
    scene: Scene, before: ModelStatus, held: list[Seen], promise: str = "told", grace_s: float = 0.0
) -> None:
    """The supervisor notices, and every client has an honest outcome.

    Args:
        scene: of the drill.
        before: the model as it was.
        held: requests that the engine had.
        promise: the bound on the outcomes.
        grace_s: what may pass before that bound begins.
    """
    limit = PROMISES[promise].limit or 0.0
    last = await scene.ended(promise, held, grace_s + limit + MOMENT_S)
    lost = await scene.event(promise, "backoff", after=before.incarnation)
    scene.record.facts["detected_s"] = round(scene.since_wall(lost), 4)
    scene.record.facts["pause_s"] = round(float(lost.get("next_try_s") or 0.0), 4)
    scene.mark(f"the supervisor noticed: {lost.get('reason')}", scene.since_wall(lost))
    scene.record.facts["told_s"] = round(last, 4)
    codes = sorted({seen.code or seen.lost or "complete" for seen in held})
    scene.mark(f"{len(held)} clients have their outcome: {', '.join(codes)}", last)
    scene.record.within(promise, max(0.0, last - grace_s))
    # One that had ended by itself before the act has lost nothing.
    cut = [seen for seen in held if not (seen.is_complete and scene.since(seen.ended_at) < 0)]
    wrong = [repr(seen) for seen in cut if not seen.is_told or seen.done or seen.finish]
    scene.record.that("honest_end", not wrong, "; ".join(wrong))


async def follow_return(
    scene: Scene, before: ModelStatus, spares: set[int], died_s: float = 0.0
) -> None:
    """Another engine becomes ready and answers.

    Args:
        scene: of the drill.
        before: the model as it was.
        spares: pids of the standbys that were prepared for it.
        died_s: when the engine died, since the act.
    """
    seen, task = scene.client.begin(scene.model_id, 4)
    ready = await scene.event(
        "served", "ready", after=before.incarnation + 1, deadline_s=LOAD_DEADLINE_S
    )
    after = await scene.until("served", "the engine is ready", lambda m: m.state == "ready")
    ready_s = scene.since_wall(ready)
    load_s = after.bare_load_s or 0.0
    is_spare = after.pid in spares
    by = ", which was a standby" if is_spare else ""
    scene.mark(f"engine #{after.incarnation} (pid {after.pid}) is ready{by}", ready_s)
    facts = scene.record.facts
    facts |= {"new_pid": after.pid, "ready_s": round(ready_s, 4), "load_s": round(load_s, 4)}
    scene.judge_replaced(before, after)
    if is_spare:
        # The pause after several deaths in a minute is a policy, no speed.
        over_s = ready_s - died_s - load_s - float(facts["pause_s"] or 0.0)
        facts["respawn_s"] = round(over_s, 4)
        scene.record.within("respawn", over_s)
    await scene.wait("served", "an answer of the new engine", task, scene.answer_s)
    if seen.first_at is not None:
        facts["first_token_s"] = round(scene.since(seen.first_at), 4)
        scene.mark("first token of the next request", scene.since(seen.first_at))
    facts["cached_tokens"] = seen.cached
    scene.judge_complete("served", seen)


async def kill(scene: Scene) -> None:
    """As the system's out-of-memory killer does."""
    await die_by(scene, signal.SIGKILL)


async def segv(scene: Scene) -> None:
    """As a crash in native code does."""
    await die_by(scene, signal.SIGSEGV)


async def abort(scene: Scene) -> None:
    """As a failed assertion of a GPU driver does."""
    await die_by(scene, signal.SIGABRT)


async def oom(scene: Scene) -> None:
    """Take the memory away: whatever the engine makes of that, clients are told and served."""
    await scene.standby_prepared()
    before = await scene.model()
    engine = await scene.engine()
    scene.record.facts |= {"old_pid": before.pid}
    mapped: int = engine.memory_info().vms
    limit = Limit(engine, "RLIMIT_AS", mapped + OOM_SPARE_BYTES)
    scene.act(
        f"engine #{before.incarnation} (pid {before.pid}) may not grow any more; a long prompt comes"
    )
    try:
        seen, task = scene.client.begin(scene.model_id, 64, prompt=OOM_PROMPT)
        await scene.wait("served", "an outcome for the long prompt", task, 120.0)
    finally:
        limit.lift()
    text = "an answer" if seen.is_complete else f"{seen.status} {seen.code}"
    scene.mark(f"the long prompt has its outcome: {text}", scene.since(seen.ended_at))
    honest = seen.is_complete or seen.is_told
    scene.record.that("honest_end", honest, "" if honest else repr(seen))
    answer = await scene.answer("an answer afterwards")
    after = await scene.model()
    scene.record.facts["new_pid"] = after.pid
    if after.last_exit is not None:
        scene.mark(f"the engine had ended: {after.last_exit.reason}")
    what = (
        "the same engine"
        if after.pid == before.pid
        else f"engine #{after.incarnation} (pid {after.pid})"
    )
    scene.mark(f"{what} answers")
    scene.judge_complete("served", answer)
