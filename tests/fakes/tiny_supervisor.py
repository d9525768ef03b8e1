"""A supervisor without a front end, to be killed: a pool of one fake engine, told on stdout.

Run as `python tests/fakes/tiny_supervisor.py RUN_DIR MODEL_FOLDER [stream] [launcher]`. It reaps
what an earlier one left, prints one JSON line per transition and load step, with `stream` keeps a
request running, and with `launcher` starts engines by a shell that forks them.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.orphans import reap_orphans
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import LoadStep, SlotEvent, Transition
from tests.raw_http import RawClient

FAKE = str(Path(__file__).resolve().parent / "fake_engine.py")


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def on_event(event: SlotEvent) -> None:
    match event:
        case Transition():
            tell(state=event.after, pid=event.pid)
        case LoadStep():
            tell(state="loading")


async def stream(pool: Pool) -> None:
    """Hold one endless stream and say when its first event came."""
    lease = await pool.find("m").admit("1")
    client = await RawClient.connect(lease.socket_path)
    body = {"stream": True, "fake": {"chunks": 1_000_000, "interval_s": 0.01}}
    client.send("/v1/chat/completions", body)
    await client.head()
    await client.chunk()
    tell(state="streaming", pid=pool.find("m").status().pid)
    while await client.chunk():
        pass


async def main() -> None:
    run_directory = RunDirectory.acquire(Path(sys.argv[1]))
    orphans = reap_orphans(run_directory.path)
    tell(orphans=[record.pid for record in orphans], strays=run_directory.remove_stray_sockets())
    engine = (sys.executable, "-P", FAKE)
    launcher = ("/bin/sh", "-c", '"$@" & wait', "launcher") if "launcher" in sys.argv[3:] else ()
    pool = Pool(
        [ModelSpec(id="m", model=sys.argv[2], preload=True)],
        command=EngineCommand(argv=(*launcher, *engine)),
        settings=SlotSettings(),
        run_directory=run_directory,
        on_event=on_event,
    )
    pool.start()
    if "stream" in sys.argv[3:]:
        await stream(pool)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
