"""Measures how long a model is away after its engine is killed, with and without a standby.

`python -m bench.bench_respawn [--kills N] [--model FOLDER] [--json FILE]`. Without a folder a tiny
model of random weights is made. The rival, in the same run and alternating, is a pool without
standbys. What is promised is the part that is not the model's bare load: from the kill to ready,
minus what an engine made of a standby spends from its spec to ready.

The delay after several crashes in a minute is switched off, since it is a policy and no speed; and
each kill waits until the standby has prepared, so this says nothing of a second kill within the
seconds that takes.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tests.material.models import FULL, build_model
from tests.raw_http import ask
from tests.waiting import wait_until

from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.blas import choose_blas
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings, SlotSettings
from mlx_isolate_supervisor.telemetry.status import ModelStatus, SlotEvent, Transition

# What is promised.
OVERHEAD_S_MAX = 0.1
DEADLINE_S = 300.0
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COLUMNS = {
    "detected": "detected_s",
    "ready": "ready_s",
    "first answer": "answer_s",
    "engine load": "bare_load_s",
    "over bare load": "over_s",
}
VARIANTS = {"no standby": 0, "standby": 1}


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill: all in seconds from the signal, but the bare load, which is a duration."""

    detected_s: float
    ready_s: float
    answer_s: float
    bare_load_s: float


class Scene:
    """One model in a pool of its own."""

    def __init__(self, home: Path, model: Path, standby: int) -> None:
        self._run_directory = RunDirectory.acquire(home)
        self._standby = standby
        blas = choose_blas("auto").environment(os.environ.get("LD_PRELOAD"))
        self._entered: list[Transition] = []
        self._pool = Pool(
            [ModelSpec(id="m", model=str(model), preload=True)],
            command=EngineCommand(env=blas, cache_home=str(home / "cache")),
            settings=SlotSettings(restart=RestartSettings(delays_s=(0.0,))),
            run_directory=self._run_directory,
            on_event=self._note,
            standby=standby,
        )

    def _note(self, event: SlotEvent) -> None:
        if isinstance(event, Transition) and event.before != event.after:
            self._entered.append(event)

    def _status(self) -> ModelStatus:
        return self._pool.find("m").status()

    async def begin(self) -> None:
        """Load, and answer once."""
        self._pool.start()
        await self._pool.ensure_ready("m", DEADLINE_S)
        await self._answer()

    async def end(self) -> None:
        """Leave nothing."""
        await self._pool.stop(10.0)
        self._run_directory.release()

    async def _answer(self) -> None:
        lease = await self._pool.find("m").admit("r")
        response = await ask(lease.socket_path, "/v1/chat/completions", CHAT)
        lease.release("answered")
        assert response.status == 200, response

    async def kill(self) -> Kill:
        """Kill the engine once the standbys are prepared; wait for the next one."""

        def prepared() -> bool:
            spares = self._pool.standbys()
            return [s.is_prepared and s.model == "m" for s in spares] == [True] * self._standby

        await wait_until(prepared, DEADLINE_S, "the standby is prepared")
        spares = {spare.pid for spare in self._pool.standbys()}
        pid = self._status().pid
        assert pid is not None
        self._entered.clear()
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: self._status().pid not in (pid, None), DEADLINE_S)
        await self._answer()
        answered = time.time()
        status = self._status()
        assert status.bare_load_s is not None
        assert not spares or status.pid in spares, "the standby was not used"
        at = {step.after: step.at for step in reversed(self._entered)}
        return Kill(
            detected_s=at["backoff"] - began,
            ready_s=at["ready"] - began,
            answer_s=answered - began,
            bare_load_s=status.bare_load_s,
        )


async def measure(model: Path, kills: int) -> dict[str, list[Kill]]:
    """All kills, both variants alternating."""
    homes = {name: Path(tempfile.mkdtemp(prefix="mi", dir="/tmp")) for name in VARIANTS}
    scenes = {name: Scene(homes[name], model, count) for name, count in VARIANTS.items()}
    taken: dict[str, list[Kill]] = {name: [] for name in VARIANTS}
    try:
        for scene in scenes.values():
            await scene.begin()
        for _ in range(kills):
            for name, scene in scenes.items():
                taken[name].append(await scene.kill())
    finally:
        for scene in scenes.values():
            await scene.end()
        for home in homes.values():
            shutil.rmtree(home, ignore_errors=True)
    return taken


def run(kills: int, model: Path | None = None) -> dict[str, Any]:
    """The whole measurement."""
    home = Path(tempfile.mkdtemp(prefix="mi"))
    try:
        folder = model or build_model(home / "m", FULL)
        taken = uvloop.run(measure(folder, kills))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    # What a load takes by itself is what is left of it when all else was done ahead.
    bare_s = statistics.median(kill.bare_load_s for kill in taken["standby"])
    return {
        "machine": machine("mlx", "mlx-lm", "uvloop"),
        "model": str(model) if model else "tiny llama, random weights",
        "kills": kills,
        "bare_load_s": bare_s,
        "results": {name: summary(rows, bare_s) for name, rows in taken.items()},
    }


def summary(rows: list[Kill], bare_s: float) -> dict[str, dict[str, float]]:
    """Median and worst of each figure; of `over_s` each standby's own load is the bare one."""
    figures = {name: [getattr(row, name) for row in rows] for name in Kill.__struct_fields__}
    figures["over_s"] = [row.ready_s - min(row.bare_load_s, bare_s) for row in rows]
    return {
        name: {"p50": statistics.median(values), "max": max(values)}
        for name, values in figures.items()
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The table for a person."""
    shown = [
        "; ".join(f"{name} {value}" for name, value in report["machine"].items()),
        f"{report['model']}, {report['kills']} kills each, seconds p50 (max)",
        f"{'':12} " + " ".join(f"{column:>15}" for column in COLUMNS),
    ]
    for name, figures in report["results"].items():
        cells = [
            f"{figures[key]['p50']:.3f} ({figures[key]['max']:.3f})" for key in COLUMNS.values()
        ]
        shown.append(f"{name:12} " + " ".join(f"{cell:>15}" for cell in cells))
    without, with_one = report["results"]["no standby"], report["results"]["standby"]
    ratio = without["ready_s"]["p50"] / with_one["ready_s"]["p50"]
    shown.append(f"a standby is ready {ratio:.1f} times as soon")
    return shown


def main() -> int:
    """Measure, print, and fail where the promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each rival (default 10)")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    report = run(args.kills, args.model)
    print("\n".join(lines(report)))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    kept = report["results"]["standby"]["over_s"]["p50"] <= OVERHEAD_S_MAX
    print("promise kept" if kept else "the promise is broken")
    return 0 if kept else 1


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
