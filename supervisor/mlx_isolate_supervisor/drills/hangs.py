"""The drill in which an engine lives but does nothing: stopped by SIGSTOP in mid-stream."""

import signal

from mlx_isolate_supervisor.drills.bounds import REPORT_SILENCE_S
from mlx_isolate_supervisor.drills.deaths import STREAMS, follow_death, follow_return
from mlx_isolate_supervisor.drills.processes import child_of, send, wake
from mlx_isolate_supervisor.drills.scene import Scene


async def hang(scene: Scene) -> None:
    """Stop a busy engine; the watchdog ends it, its clients are told, another takes over."""
    spares = await scene.standby_prepared()
    held = await scene.streams(STREAMS)
    status = await scene.status()
    before = await scene.model()
    engine = child_of(status.supervisor.pid, before.pid)
    scene.record.facts |= {"signal": "SIGSTOP", "old_pid": before.pid}
    scene.act(f"SIGSTOP to engine #{before.incarnation} (pid {before.pid})")
    send(engine, signal.SIGSTOP)
    try:
        await follow_death(scene, before, held, "hang_told", silence_of(scene))
    finally:
        # Where no watchdog runs, the drill leaves the engine as it found it.
        wake(engine)
    codes = {seen.code for seen in held if seen.code}
    scene.mark(f"the cause they were told: {', '.join(sorted(codes))}")
    noticed_s = float(scene.record.facts["detected_s"] or 0.0)
    await follow_return(scene, before, spares, noticed_s)


def silence_of(scene: Scene) -> float:
    """The daemon's --report-silence: that of our own is known, of another one the default."""
    flags = scene.own_flags
    if "--report-silence" in flags:
        return float(flags[flags.index("--report-silence") + 1])
    return REPORT_SILENCE_S
