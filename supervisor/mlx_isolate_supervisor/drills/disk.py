"""The drill in which the disk of the prompt cache is full: no answer fails, writes resume."""

import secrets
from typing import Any

from mlx_isolate_supervisor.drills.processes import Limit
from mlx_isolate_supervisor.drills.record import CannotRun
from mlx_isolate_supervisor.drills.scene import LOAD_DEADLINE_S, Scene
from mlx_isolate_supervisor.telemetry.status import ModelStatus

# Bytes that a file may have meanwhile: less than any cache entry.
FILE_BYTES = 4096
PROMPTS = 4
FLUSH = "/admin/cache/flush?timeout_s=20"
FLUSH_DEADLINE_S = 60.0


async def disk_full(scene: Scene) -> None:
    """Let every write of the engine fail for a while, as a full disk does."""
    before = await scene.until("disk_noticed", "its counters", lambda m: m.progress is not None)
    assert before.progress is not None
    if not before.progress.cache.ssd_enabled:
        raise CannotRun("the engine has no prompt cache on disk")
    await scene.answer("an answer before")
    earlier = _failed_writes(before)

    def has_failed(model: ModelStatus) -> bool:
        return _failed_writes(model) > earlier

    limit = Limit(await scene.engine(), "RLIMIT_FSIZE", FILE_BYTES)
    scene.act(
        f"engine #{before.incarnation} (pid {before.pid}) cannot write files above {FILE_BYTES} bytes"
    )
    scene.record.facts["old_pid"] = before.pid
    try:
        await _answers(scene, "while the disk is full")
        code, _ = await _flush(scene)
        scene.mark(f"a flush is answered {code}")
        counted = await scene.until("disk_noticed", "a failed write is counted", has_failed, 20.0)
        failed = _failed_writes(counted) - earlier
        scene.mark(f"{failed} failed writes are counted")
        scene.record.that("disk_noticed", failed > 0 and code != 200, f"{failed}, flush {code}")
    finally:
        limit.lift()
    scene.mark("there is room again")
    code, evidence = await _flush(scene)
    entries = _entries(evidence)
    scene.mark(f"a flush is answered {code}, {entries} entries are on disk")
    scene.record.that("disk_resumes", code == 200 and entries > 0, f"{code}, {entries} entries")
    await _answers(scene, "afterwards")
    after = await scene.model()
    scene.record.facts["new_pid"] = after.pid
    scene.judge_same(before, after)


async def _answers(scene: Scene, when: str) -> None:
    # Prompts of an earlier repetition lie on disk already, and nothing would have to be written.
    mark = secrets.token_hex(8)
    asked = [
        await scene.wait(
            "uncut",
            f"an answer {when}",
            scene.client.answer(scene.model_id, prompt=f"{mark}, {number}: " + "word " * 60),
            LOAD_DEADLINE_S,
        )
        for number in range(PROMPTS)
    ]
    whole = sum(seen.is_complete for seen in asked)
    scene.mark(f"{whole} of {PROMPTS} requests are answered {when}")
    scene.judge_complete("uncut", *asked)


async def _flush(scene: Scene) -> tuple[int, Any]:
    return await scene.wait("disk_resumes", "a flush", scene.client.post(FLUSH), FLUSH_DEADLINE_S)


def _failed_writes(model: ModelStatus) -> int:
    return model.progress.cache.failed_writes if model.progress else 0


def _entries(evidence: Any) -> int:
    models: dict[str, Any] = evidence.get("models", {})
    return sum(int(found.get("entries", 0)) for found in models.values())
