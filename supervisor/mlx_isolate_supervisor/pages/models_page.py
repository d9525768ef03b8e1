"""The models as clients list them: /v1/models and llama-swap's /running, from snapshots."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlx_isolate_supervisor.telemetry.status import ModelStatus

# States in which an engine process exists.
RUNNING_STATES = frozenset({"starting", "ready", "draining", "stopping"})


def model_object(status: ModelStatus, created: int) -> dict[str, Any]:
    """One model in OpenAI's shape and Anthropic's, with what other servers add to it.

    Args:
        status: the model.
        created: seconds since the epoch that stand for its making; clients want a number.
    """
    found: dict[str, Any] = {
        "id": status.id,
        "object": "model",
        "created": created,
        "owned_by": "mlx-isolate",
        "type": "model",
        "display_name": status.id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "aliases": status.aliases,
        "status": {"value": status.state},
    }
    if status.facts is not None:
        found["max_model_len"] = status.facts.context_length
        found["context_length"] = status.facts.context_length
        found["max_input_tokens"] = status.facts.context_length
        found["meta"] = {
            "architecture": status.facts.architecture,
            "n_params": status.facts.parameters,
            "n_vocab": status.facts.vocab_size,
            "size": status.facts.weights_bytes,
            "dtype": status.facts.dtype,
        }
    return found


def model_list(models: Sequence[ModelStatus], unlisted: set[str], created: int) -> dict[str, Any]:
    """OpenAI's list of all models but the unlisted ones, which is one page of Anthropic's."""
    data = [model_object(status, created) for status in models if status.id not in unlisted]
    page = {
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": False,
    }
    return {"object": "list", "data": data, **page}


def running_list(models: Sequence[ModelStatus]) -> dict[str, Any]:
    """llama-swap's list of the models that have an engine."""
    running = [
        {
            "model": status.id,
            "state": status.state,
            "pid": status.pid,
            "incarnation": status.incarnation,
            "active": status.active,
            "queued": status.queued,
            "memory_bytes": status.memory_bytes,
            "pinned": status.pinned,
            "ttl": status.ttl_s or 0,
            "ttl_left_s": status.ttl_left_s,
        }
        for status in models
        if status.state in RUNNING_STATES
    ]
    return {"running": running}


def health(models: Sequence[ModelStatus], *, is_stopping: bool) -> tuple[int, dict[str, Any]]:
    """Status code and body of /health: can this daemon serve a request?

    200 as long as any model is served or will be; a model that loads or comes back makes its
    requests wait, so it is no reason for a monitor to act. 503 while stopping, and when every
    model has failed.
    """
    states = {status.id: status.state for status in models}
    if is_stopping:
        return 503, {"status": "stopping", "models": states}
    failed = [status for status in models if status.state == "failed"]
    if models and len(failed) == len(models):
        return 503, {"status": "failed", "models": states}
    if failed or any(status.state == "backoff" for status in models):
        return 200, {"status": "degraded", "models": states}
    if any(status.state == "starting" for status in models):
        return 200, {"status": "loading", "models": states}
    return 200, {"status": "ok", "models": states}


def readiness(models: Sequence[ModelStatus], *, is_stopping: bool) -> tuple[int, dict[str, Any]]:
    """Status code and body of /readyz: is every model that should be up ready this moment?"""
    waiting = [s.id for s in models if s.desired == "up" and s.state != "ready"]
    ready = not waiting and not is_stopping
    status = "stopping" if is_stopping else "ready" if ready else "waiting"
    return (200 if ready else 503), {"status": status, "waiting_for": waiting}
