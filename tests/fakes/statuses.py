"""Made-up snapshots of models and supervisor, for what only shows them."""

from typing import Any

import msgspec

from mlx_isolate_shared.wire import ModelFacts
from mlx_isolate_supervisor.telemetry.status import ModelStatus, Status, SupervisorStatus

FACTS = ModelFacts(
    architecture="gemma3_text",
    parameters=268_000_000,
    weights_bytes=1_072_000_000,
    dtype="float32",
    context_length=32768,
    vocab_size=262_144,
    backend="cpu",
    blas="OpenBLAS",
)


def model_status(**changes: Any) -> ModelStatus:
    """A model that nobody has asked for yet, with `changes`."""
    stopped = ModelStatus(
        id="m",
        aliases=(),
        desired="down",
        state="stopped",
        pid=None,
        incarnation=0,
        socket=None,
        since=1000.0,
        restarts=0,
        restarts_by_cause={},
        last_exit=None,
        active=0,
        queued=0,
        load_s=None,
        memory_bytes=None,
        memory_kind=None,
        facts=None,
        loading=None,
        progress=None,
        failure=None,
        next_try_s=None,
    )
    return msgspec.structs.replace(stopped, **changes)


def ready_status(**changes: Any) -> ModelStatus:
    """A model that is served, with `changes`."""
    ready: dict[str, Any] = {
        "desired": "up",
        "state": "ready",
        "pid": 4711,
        "incarnation": 1,
        "socket": "/run/x.sock",
        "load_s": 2.34,
        "memory_bytes": 1_200_000_000,
        "memory_kind": "pss",
        "facts": FACTS,
    }
    return model_status(**(ready | changes))


def status(*models: ModelStatus) -> Status:
    """A whole document."""
    own = SupervisorStatus(
        pid=4700,
        version="0.1.0",
        uptime_s=3725.0,
        memory_bytes=45_000_000,
        memory_kind="pss",
        run_dir="/run/user/1000/mlx-isolate/8080",
    )
    return Status(supervisor=own, models=models)
