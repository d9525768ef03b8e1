"""Checking a request's settings against the model and filling in the engine's defaults; pure."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from mlx_isolate_engine.completion.request import CompletionRequest, SamplingRequest
from mlx_isolate_engine.generation.plan import SamplingPlan
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import RequestError

Number = TypeVar("Number", int, float)

TOP_LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 64
# Largest count that mlx-lm's penalties may look back; beyond any context.
CONTEXT_SIZE_MAX = 1 << 24
BIAS_MAX = 1e4
PENALTY_MAX = 1e4
# mlx-lm's default where a request names a penalty but no context size.
DEFAULT_PENALTY_CONTEXT = 20


class _Range(msgspec.Struct, frozen=True):
    lowest: float
    highest: float


_RANGES = {
    "temperature": _Range(0.0, 1e4),
    "top_p": _Range(0.0, 1.0),
    "min_p": _Range(0.0, 1.0),
    "xtc_probability": _Range(0.0, 1.0),
    "xtc_threshold": _Range(0.0, 0.5),
    "repetition_penalty": _Range(0.0, PENALTY_MAX),
    "presence_penalty": _Range(-PENALTY_MAX, PENALTY_MAX),
    "frequency_penalty": _Range(-PENALTY_MAX, PENALTY_MAX),
    "repetition_context_size": _Range(0, CONTEXT_SIZE_MAX),
    "presence_context_size": _Range(0, CONTEXT_SIZE_MAX),
    "frequency_context_size": _Range(0, CONTEXT_SIZE_MAX),
    "top_k": _Range(-1, math.inf),
}


def resolve_sampling(
    request: SamplingRequest, settings: EngineSettings, vocabulary_size: int
) -> SamplingPlan:
    """Every sampling setting with its value, or a refusal that names the field.

    A top_p of 0 keeps one token, so it is greedy; a top_k of -1, 0 or at least the vocabulary's
    size filters nothing; a repetition penalty of 0 or 1 is none, as in mlx-lm.
    """
    for name, limits in _RANGES.items():
        value = getattr(request, name)
        if value is None:
            continue
        if not math.isfinite(value) or not limits.lowest <= value <= limits.highest:
            upper = "" if limits.highest == math.inf else f" and at most {limits.highest:g}"
            raise RequestError(f"{name} must be at least {limits.lowest:g}{upper}.", param=name)
    top_p = _first(request.top_p, settings.top_p)
    top_k = max(0, _first(request.top_k, settings.top_k))
    return SamplingPlan(
        temperature=0.0 if top_p == 0 else _first(request.temperature, settings.temp),
        top_p=top_p,
        top_k=0 if top_k >= vocabulary_size else top_k,
        min_p=_first(request.min_p, settings.min_p),
        xtc_probability=_first(request.xtc_probability, 0.0),
        xtc_threshold=_first(request.xtc_threshold, 0.1),
        repetition_penalty=_first(request.repetition_penalty, 1.0) or 1.0,
        repetition_context_size=_first(request.repetition_context_size, DEFAULT_PENALTY_CONTEXT),
        presence_penalty=_first(request.presence_penalty, 0.0),
        presence_context_size=_first(request.presence_context_size, DEFAULT_PENALTY_CONTEXT),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        frequency_context_size=_first(request.frequency_context_size, DEFAULT_PENALTY_CONTEXT),
        logit_bias=_check_bias(request.logit_bias or {}, vocabulary_size),
        seed=None if request.seed is None else request.seed & ((1 << 64) - 1),
    )


def _first(asked: Number | None, default: Number) -> Number:
    return default if asked is None else asked


def _check_bias(bias: dict[int, float], vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    for token, value in bias.items():
        if not 0 <= token < vocabulary_size:
            raise RequestError(
                f"logit_bias names token {token}, and this model's tokens are 0 to "
                f"{vocabulary_size - 1}.",
                param="logit_bias",
            )
        if not math.isfinite(value) or abs(value) > BIAS_MAX:
            raise RequestError(
                f"logit_bias values must lie between {-BIAS_MAX:g} and {BIAS_MAX:g}.",
                param="logit_bias",
            )
    return tuple(bias.items())


def resolve_max_tokens(
    asked: int | None, settings: EngineSettings, prompt_tokens: int, context_length: int
) -> int:
    """Tokens to generate at most: what was asked, never beyond the context; at least one.

    The last token of a completion need not fit any more: it is never run.
    """
    if asked is not None and asked < 1 and asked != -1:
        raise RequestError("max_tokens must be at least 1, or -1 for no limit.", param="max_tokens")
    room = max(1, context_length - prompt_tokens)
    if asked is None:
        asked = settings.max_tokens
    return room if asked < 1 else min(asked, room)


def check_request(request: CompletionRequest) -> None:
    """Refuse what this engine cannot do with any model, naming the field."""
    top = request.top_logprobs
    if top is not None and not 0 <= top <= TOP_LOGPROBS_MAX:
        raise RequestError(
            f"top_logprobs must be between 0 and {TOP_LOGPROBS_MAX}.", param="top_logprobs"
        )
    if not all(request.stop):
        raise RequestError("A stop string must not be empty.", param="stop")
    if len(request.stop) > STOP_STRINGS_MAX:
        raise RequestError(f"At most {STOP_STRINGS_MAX} stop strings.", param="stop")


def check_adapter(name: str | None, names: Collection[str]) -> None:
    """Refuse an adapter that is not configured.

    Raises:
        RequestError: there is none of that name.
    """
    if name is None or name in names:
        return
    known = f"there are: {', '.join(sorted(names))}" if names else "there are none"
    raise RequestError(
        f"No adapter of that name is configured ({known}).",
        param="adapters",
        code="adapter_not_found",
    )


def resolve_draft_tokens(
    request: CompletionRequest, settings: EngineSettings, *, can_draft: bool
) -> int:
    """Tokens to draft at a time, 0 where no draft model is configured or none can be used.

    Speculative decoding changes the speed of an answer, never the answer's distribution; what it
    cannot do (log probabilities, grammars) runs without it.

    Raises:
        RequestError: the request names a draft model, and it is not the configured one.
    """
    name = None if settings.draft_model is None else draft_name(settings.draft_model)
    if request.draft_model is not None and request.draft_model != name:
        known = "none is" if name is None else f"it is {name}"
        raise RequestError(
            f"No draft model of that name is configured ({known}).", param="draft_model"
        )
    if name is None and request.num_draft_tokens is not None:
        raise RequestError("No draft model is configured.", param="num_draft_tokens")
    if name is None or not can_draft or request.top_logprobs is not None:
        return 0
    return max(1, _first(request.num_draft_tokens, settings.num_draft_tokens))


def draft_name(model: str) -> str:
    """What requests call the draft model: a folder's own name, or the repo id."""
    return Path(model).name if Path(model).is_absolute() else model
