"""Why an engine ended, in words: for operators (everything) and for clients (no paths).

Pure text. What a client reads is one sentence without a path, class name or traceback.
"""

import re

from mlx_isolate_shared import wire
from mlx_isolate_shared.errors import CapacityError, EngineError
from mlx_isolate_supervisor.engines.child import Exit
from mlx_isolate_supervisor.models.room import Refusal
from mlx_isolate_supervisor.settings.quantities import show_bytes
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.slots.restart import Judgement
from mlx_isolate_supervisor.telemetry.status import Failure, LastExit

_PATH = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^\s'\"/]+/)*([^\s'\"/]*)")
_CLASS_PREFIX = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b:?\s*")
# Of a crash's last line, so much is shown to clients.
_LAST_WORDS_MAX = 200


def hide_paths(text: str) -> str:
    """Each absolute path replaced by its last part."""
    return _PATH.sub(lambda found: found.group(1) or "…", text)


def describe_exit(exit: Exit) -> str:
    """`was killed by SIGKILL` or `exited with code 1`."""
    if exit.signal is not None:
        return f"was killed by {exit.signal}"
    return f"exited with code {exit.code}"


def last_words(tail: tuple[str, ...]) -> str:
    """The last line of an engine's output, fit for a client; empty if there is none."""
    for line in reversed(tail):
        text = _CLASS_PREFIX.sub("", line.strip())
        if text and not line.startswith(("  ", "\t", "Traceback")):
            return hide_paths(text)[:_LAST_WORDS_MAX]
    return ""


def died(exit: Exit | None, *, planned: bool) -> EngineError:
    """502 for a request whose engine ended, or (None) whose connection broke."""
    if planned:
        what = "the engine was stopped"
    elif exit is None:
        what = "the engine broke the connection"
    else:
        what = f"the engine {describe_exit(exit)}"
    message = f"{what} while it worked on this request; a new try may succeed."
    error = EngineError(message, status=502, code="engine_died")
    error.is_planned = planned
    error.engine_lives = exit is None and not planned
    return error


def cut(why: CapacityError) -> EngineError:
    """For a request whose engine was stopped for good; as `why`, which waiting ones are told."""
    message = f"the engine was stopped while it worked on this request: {why.message}"
    error = EngineError(message, status=why.status, code=why.code, retry_after_s=why.retry_after_s)
    error.is_planned = True
    return error


def hung(why: str) -> EngineError:
    """504 for a request whose engine the watchdog ended; `why` as in `watchdog.look`."""
    message = f"the engine was ended while it worked on this request, because {why}."
    return EngineError(message, status=504, code="engine_hung")


def failed(model_id: str, failure: Failure, retry_in_s: float | None) -> CapacityError:
    """503 at once, for a FAILED model."""
    message = f"the model {model_id} is not available: {hide_paths(failure.message)}"
    code = "circuit_open" if failure.cause == "circuit_open" else "model_failed"
    return CapacityError(message, status=503, code=code, retry_after_s=retry_in_s)


def waited_in_vain(model_id: str, cause: str, retry_after_s: float) -> CapacityError:
    """503 for a request whose queue timeout passed; `cause` is a phrase, maybe with paths."""
    message = f"no place in the engine of {model_id} became free in time: {hide_paths(cause)}."
    return CapacityError(message, status=503, code="queue_timeout", retry_after_s=retry_after_s)


def replacement_failed(model_id: str, why: str) -> CapacityError:
    """503 for a reload whose new engine did not come up."""
    message = f"the new engine of {model_id} did not come up, the old one serves on: "
    return CapacityError(message + hide_paths(why), status=503, code="reload_failed")


def no_room(model_id: str, refusal: Refusal) -> CapacityError:
    """507 for a model that does not fit, whoever leaves; with the figures."""
    held = ", ".join(
        f"{one.id} ({show_bytes(one.bytes)}{', pinned' if one.is_pinned else ''})"
        for one in refusal.held
    )
    kind = "GPU memory" if refusal.is_of_gpu else "memory"
    message = f"the model {model_id} needs about {show_bytes(refusal.need_bytes)} of {kind}, "
    if refusal.budget_bytes is None:
        message += f"and at most {refusal.models_max} models may be loaded"
    else:
        message += f"and the budget of all models is {show_bytes(refusal.budget_bytes)}"
    message += f"; held by {held}." if held else "; nothing else is loaded."
    return CapacityError(message, status=507, code="memory_budget_exceeded")


def queue_full(model_id: str, waiting: int) -> CapacityError:
    """429 for a request that finds the queue full."""
    message = f"{waiting} requests already wait for {model_id}."
    return CapacityError(message, status=429, code="queue_full", retry_after_s=1.0)


def shutting_down() -> CapacityError:
    """503 while the supervisor stops."""
    message = "the server is shutting down."
    return CapacityError(message, status=503, code="shutting_down", retry_after_s=5.0)


def removed(model: str) -> CapacityError:
    """503 for who waited for a model that is served no longer; who asks later gets 404."""
    message = f"{model} was taken out of the configuration."
    return CapacityError(message, status=503, code="model_removed")


def own_fault() -> Failure:
    """Why a model is FAILED whose engine was lost to a fault of the supervisor's own code."""
    message = (
        "the server made a mistake in its own bookkeeping of this model; its log has the details"
    )
    return Failure(cause="circuit_open", code="internal_error", message=message)


def not_done(model_id: str) -> CapacityError:
    """503 for whoever asked for what a fault of the supervisor's own code has made impossible."""
    message = f"the server made a mistake about {model_id}; its log has the details."
    return CapacityError(message, status=503, code="internal_error", retry_after_s=1.0)


def failure_of(
    judgement: Judgement, exit: LastExit, reported: wire.Failed | None
) -> Failure | None:
    """Why a model is FAILED after `judgement`; None where it is not.

    Args:
        exit: the exit that was judged.
        reported: the engine's own last word, if it had one.
    """
    words = last_words(exit.stderr_tail)
    is_told = any(exit.reason in line for line in exit.stderr_tail)
    said = f" (its last words: {words})" if words and not is_told else ""
    match judgement.event:
        case Event.CANNOT_WORK:
            code = "exit_78" if reported is None else reported.code
            message = f"{exit.reason}{said}" if reported is None else reported.message
            return Failure(cause="cannot_work", code=code, message=message)
        case Event.CIRCUIT_OPENED:
            message = (
                f"{judgement.budget.streak} engines in a row ended before they completed a "
                f"request; of the last one: {exit.reason}{said}"
            )
            return Failure(cause="circuit_open", code=exit.cause, message=message)
        case _:
            return None
