"""The drills there are, as a table: name, what is done, and what a drill needs of a daemon."""

from collections.abc import Awaitable, Callable

import msgspec

from mlx_isolate_supervisor.drills.changes import reload, swap
from mlx_isolate_supervisor.drills.deaths import abort, kill, oom, segv
from mlx_isolate_supervisor.drills.disk import disk_full
from mlx_isolate_supervisor.drills.endings import supervisor_kill, term
from mlx_isolate_supervisor.drills.guests import client_gone, stalled_client
from mlx_isolate_supervisor.drills.hangs import hang
from mlx_isolate_supervisor.drills.scene import Scene
from mlx_isolate_supervisor.drills.starts import crash_loop, slow_load

ONE_MODEL = ("drill",)


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """One drill.

    Attributes:
        name: as typed.
        help: what is done, for a person.
        run: does it.
        own_because: why only a throw-away daemon will do; empty if any daemon will.
        flags: what its throw-away daemon needs.
        models: names under which its throw-away daemon serves its model.
        judges_median: the median of its respawns is promised. That of kill −9 is; other signals
            first let the engine write its stacks.
    """

    name: str
    help: str
    run: Callable[[Scene], Awaitable[None]]
    own_because: str = ""
    flags: tuple[str, ...] = ()
    models: tuple[str, ...] = ONE_MODEL
    judges_median: bool = False


_ALL = (
    Drill(name="kill", help="SIGKILL to a busy engine", run=kill, judges_median=True),
    Drill(name="segv", help="SIGSEGV to a busy engine", run=segv),
    Drill(name="abort", help="SIGABRT to a busy engine", run=abort),
    Drill(
        name="oom",
        help="an engine that can allocate no more memory gets a long prompt",
        run=oom,
        own_because="it limits the memory of an engine",
    ),
    Drill(name="hang", help="SIGSTOP to a busy engine", run=hang),
    Drill(
        name="slow-load",
        help="a load that is held up while many first requests wait",
        run=slow_load,
        own_because="it unloads the model and needs a daemon without standby",
        flags=("--standby", "0"),
    ),
    Drill(
        name="crash-loop",
        help="every engine is killed until the daemon gives up",
        run=crash_loop,
        own_because="it takes the model out of service",
    ),
    Drill(
        name="supervisor-kill",
        help="SIGKILL to the supervisor, then a new start",
        run=supervisor_kill,
        own_because="it kills the daemon",
    ),
    Drill(
        name="term",
        help="SIGTERM to the supervisor in mid-stream",
        run=term,
        own_because="it stops the daemon",
    ),
    Drill(
        name="swap",
        help="a switch between two models of which one may be loaded, in mid-stream",
        run=swap,
        own_because="it needs two models and --models-max 1",
        flags=("--models-max", "1"),
        models=("drill-a", "drill-b"),
    ),
    Drill(
        name="reload",
        help="a reload of the model under steady streams",
        run=reload,
    ),
    Drill(
        name="disk-full",
        help="the prompt cache on disk cannot be written for a while",
        run=disk_full,
        own_because="it needs a prompt cache folder of its own",
        flags=("--ssd-cache-dir", "{home}/cache"),
    ),
    Drill(
        name="client-gone",
        help="clients leave in mid-stream",
        run=client_gone,
    ),
    Drill(
        name="stalled-client",
        help="a client stops reading for a while",
        run=stalled_client,
    ),
)

DRILLS: dict[str, Drill] = {drill.name: drill for drill in _ALL}
EVERY = "all"
