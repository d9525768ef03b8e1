"""Drills in which the supervisor ends: killed, or asked to stop while requests run."""

import signal
import time
from pathlib import Path

import psutil

from mlx_isolate_supervisor.drills.bounds import PROMISES
from mlx_isolate_supervisor.drills.polling import poll
from mlx_isolate_supervisor.drills.processes import children, is_alive
from mlx_isolate_supervisor.drills.record import Broken
from mlx_isolate_supervisor.drills.scene import MOMENT_S, Scene

STREAMS = 2
# Short enough to be done within the shutdown window.
TOKENS = 48


async def supervisor_kill(scene: Scene) -> None:
    """SIGKILL to the supervisor in mid-stream: nothing lives on, and the next start works."""
    await scene.standby_prepared()
    held = await scene.streams(STREAMS)
    own = scene.own
    left = children(own.pid)
    old = await scene.model()
    scene.prober.stop()
    scene.act(f"SIGKILL to supervisor {own.pid}, which has {len(left)} child processes")
    scene.record.facts |= {"signal": "SIGKILL", "old_pid": own.pid}
    assert own.process is not None
    own.process.kill()
    await own.wait_end(MOMENT_S)
    gone_s = await _all_gone(scene, left)
    scene.mark("none of its child processes lives", gone_s)
    scene.record.within("engines_gone", gone_s)
    told = await scene.ended("told", held, MOMENT_S)
    scene.mark(f"{len(held)} clients have their outcome", told)
    wrong = [repr(seen) for seen in held if seen.done or seen.finish]
    scene.record.that("honest_end", not wrong, "; ".join(wrong))
    again = time.monotonic()
    await own.start()
    scene.record.within("restart", time.monotonic() - again)
    scene.mark(f"supervisor {own.pid} listens on the same port")
    await scene.load()
    new = await scene.model()
    scene.record.facts |= {"new_pid": own.pid, "ready_s": round(scene.since(), 4)}
    scene.mark(f"engine #{new.incarnation} (pid {new.pid}) is ready")
    scene.judge_replaced(old, new)
    scene.judge_complete("served", await scene.answer("an answer"))


async def term(scene: Scene) -> None:
    """SIGTERM to the supervisor: running streams finish, and nothing is left."""
    held = await scene.streams(STREAMS, TOKENS)
    own = scene.own
    left = children(own.pid)
    scene.prober.stop()
    scene.act(f"SIGTERM to supervisor {own.pid}")
    scene.record.facts |= {"signal": "SIGTERM", "old_pid": own.pid}
    assert own.process is not None
    own.process.send_signal(signal.SIGTERM)
    limit = PROMISES["stop"].limit or 0.0
    status = await own.wait_end(limit + MOMENT_S)
    if status is None:
        raise Broken("stop", f"it still runs after {limit + MOMENT_S:g} s")
    scene.mark(f"it has ended with status {status}")
    scene.record.within("stop", scene.since())
    scene.record.that("exit_status", status == 0, f"{status}")
    await scene.ended("uncut", held, MOMENT_S)
    scene.judge_complete("uncut", *held)
    alive = [child.pid for child in left if is_alive(child)]
    sockets = [path.name for path in _sockets(own.run_dir)]
    kept = not alive and not sockets
    scene.record.that("nothing_left", kept, f"{alive} {sockets}" if not kept else "")


async def _all_gone(scene: Scene, left: list[psutil.Process]) -> float:
    limit = PROMISES["engines_gone"].limit or 0.0
    gone = poll(lambda: not any(is_alive(child) for child in left))
    await scene.wait("engines_gone", "no child process lives", gone, limit + MOMENT_S)
    return scene.since()


def _sockets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()] if folder.is_dir() else []
