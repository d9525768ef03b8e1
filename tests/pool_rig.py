"""A pool of fake engines in this process: real children, sockets and signals, made-up answers."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.orphans import process_start
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.slots.lease import Lease, Outcome
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings, SlotSettings
from mlx_isolate_supervisor.telemetry.status import (
    ModelStatus,
    SlotEvent,
    StandbyStatus,
    Transition,
)
from tests.raw_http import RawClient, RawResponse, ask
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
FAKE_COMMAND = EngineCommand(argv=(sys.executable, "-P", str(ROOT / "tests/fakes/fake_engine.py")))
CHAT = "/v1/chat/completions"
# A tenth of the default delays and pauses, so that a test of many crashes takes seconds; the
# policy's own numbers are tested at their defaults in tests/unit/test_restart_policy.py.
QUICK_RESTART = RestartSettings(
    delays_s=(0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5), half_open_s=0.5, half_open_max_s=2.0
)


class PoolRig:
    """A started pool with its folders and everything that it told."""

    def __init__(self, pool: Pool, run_directory: RunDirectory, models: Path) -> None:
        self.pool = pool
        self.run_directory = run_directory
        self.models = models
        self.events: list[SlotEvent] = []

    def status(self, model: str = "m") -> ModelStatus:
        return self.pool.find(model).status()

    @property
    def transitions(self) -> list[Transition]:
        return [event for event in self.events if isinstance(event, Transition)]

    def moves(self, model: str = "m") -> list[str]:
        """States entered, in order."""
        steps = [step for step in self.transitions if step.model == model]
        return [step.after for step in steps if step.before != step.after]

    def spawns(self, model: str = "m") -> list[float]:
        """When incarnations were spawned."""
        steps = [step for step in self.transitions if step.model == model]
        return [step.at for step in steps if step.after == "starting" != step.before]

    def pauses(self, model: str = "m") -> list[float]:
        """Seconds from each end of an incarnation that never got ready to the next spawn."""
        steps = [step for step in self.transitions if step.model == model]
        ends = [step.at for step in steps if step.before == "starting" != step.after]
        return [spawn - end for end, spawn in zip(ends, self.spawns(model)[1:], strict=False)]

    def set_faults(self, model: str = "m", **faults: Any) -> None:
        """What incarnations spawned from now on do wrong; see tests/fakes/fake_faults.py."""
        (self.models / model / "fake.json").write_text(json.dumps(faults))

    def pid(self, model: str = "m") -> int:
        pid = self.status(model).pid
        assert pid is not None
        return pid

    def kill(self, model: str = "m", number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the engine that runs now; returns its pid."""
        pid = self.pid(model)
        os.kill(pid, number)
        return pid

    async def until_state(self, state: str, model: str = "m", deadline_s: float = 10.0) -> None:
        await wait_until(
            lambda: self.status(model).state == state, deadline_s, f"{model} is {state}"
        )

    async def complete(self, model: str = "m", **fake: Any) -> RawResponse:
        """Admit, ask the engine for a short answer, release; engine errors are raised."""
        lease = await self.pool.find(model).admit("r")
        return await with_lease(lease, {"fake": fake})

    async def standby(self, prepared: bool = True, deadline_s: float = 10.0) -> StandbyStatus:
        """Wait for one spare engine (done with its preparation) and return it."""

        def found() -> list[StandbyStatus]:
            return [spare for spare in self.pool.standbys() if spare.is_prepared or not prepared]

        spares = await wait_until(found, deadline_s, "there is a standby")
        return spares[0]

    def sockets(self) -> list[str]:
        return sorted(path.name for path in self.run_directory.path.glob("*.sock"))

    def records(self) -> list[str]:
        return sorted(path.name for path in self.run_directory.path.glob("engine-*"))


async def with_lease(lease: Lease, body: dict[str, Any]) -> RawResponse:
    """What a relay does with a lease, without the bytes: ask, tell a death, release once."""
    outcome: Outcome = "cancelled"
    try:
        response = await ask(lease.socket_path, CHAT, body)
        if not response.ended:
            raise ConnectionResetError
        outcome = "answered"
        return response
    except (OSError, asyncio.IncompleteReadError):
        outcome = "failed"
        raise await lease.death() from None
    finally:
        lease.release(outcome)


async def open_stream(lease: Lease, **fake: Any) -> RawClient:
    """Begin a stream in the engine of `lease` and read its first event."""
    client = await RawClient.connect(lease.socket_path)
    client.send(CHAT, {"stream": True, "fake": fake})
    await client.head()
    await client.chunk()
    return client


@asynccontextmanager
async def pool_rig(
    models: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    settings: SlotSettings | None = None,
    command: EngineCommand = FAKE_COMMAND,
    places: int = 4,
    preload: bool = False,
    aliases: tuple[str, ...] = (),
    standby: int | None = 0,
    limits: PoolLimits | None = None,
    needs: Mapping[str, int] | None = None,
) -> AsyncGenerator[PoolRig]:
    """A running pool; on leaving it is stopped, and nothing of it may be left.

    Args:
        models: start faults by model id; one model `m` without faults if absent.
        settings: limits; the defaults with QUICK_RESTART if absent.
        standby: spare engines; none unless a test is about them, since most count processes.
        limits: of all models together; none if absent.
        needs: bytes that a model needs, by id (its share of the prompt cache; no engine uses it).
    """
    home = Path(tempfile.mkdtemp(prefix="mi", dir="/tmp"))
    run_directory = RunDirectory.acquire(home / "run")
    specs: list[ModelSpec] = []
    for model in models or {"m": {}}:
        (home / "models" / model).mkdir(parents=True)
        share = None if needs is None else needs[model]
        engine = EngineSettings(decode_concurrency=places, prompt_cache_bytes=share)
        spec = ModelSpec(id=model, model=str(home / "models" / model), engine=engine)
        specs.append(msgspec.structs.replace(spec, preload=preload, aliases=aliases))
    rigs: list[PoolRig] = []
    pool = Pool(
        specs,
        command=command,
        settings=settings or SlotSettings(restart=QUICK_RESTART),
        run_directory=run_directory,
        on_event=lambda event: rigs[0].events.append(event),
        standby=standby,
        limits=limits,
    )
    rig = PoolRig(pool, run_directory, home / "models")
    rigs.append(rig)
    for model, faults in (models or {}).items():
        rig.set_faults(model, **faults)
    pool.start()
    try:
        yield rig
    finally:
        spares = {spare.pid for spare in pool.standbys()}
        await pool.stop(2.0)
        pids = {step.pid for step in rig.transitions if step.pid is not None} | spares
        left = [pid for pid in pids if process_start(pid) is not None]
        leftovers = rig.sockets() + rig.records()
        run_directory.release()
        shutil.rmtree(home)
        assert not left, f"engines left: {left}"
        assert not leftovers


def run(main: Coroutine[Any, Any, None], deadline_s: float = 30.0) -> None:
    """Run a test's coroutine on the daemon's event loop, with a deadline of its own."""

    async def bounded() -> None:
        async with asyncio.timeout(deadline_s):
            await main

    uvloop.run(bounded())
