"""What a running completion tells its protocol: deltas in order, then exactly one summary."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]
Placement = Literal["continuous", "serial"]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token with its log probability (<= 0) and its alternatives, best first.

    Attributes:
        token: the token's text as decoded alone (may hold U+FFFD for a part of a character).
        raw: the token's exact bytes; joined over a completion they are the content's bytes.
    """

    token: str
    raw: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class ContentDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Text for the client; never part of a stop string, never half a character.

    `logprobs` holds the tokens whose text this delta completes (empty if not asked for).
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Text from inside a think block, without its markers."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tool call; `id` and `name` come with the first part of each index."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class PrefillProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens processed so far, of all that this request has."""

    done: int
    total: int


Event = ContentDelta | ReasoningDelta | ToolCallDelta | PrefillProgress


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's timings object: n in tokens, ms in milliseconds.

    cache_n: prompt tokens taken from the prompt cache; prompt_n: those run through the model.
    draft_n: tokens that a draft model proposed; draft_n_accepted: those that were taken.
    cache_tier: which tier they came from; cache_reason: of the choice between restoring them and
    running them (`restore_cheaper`, `prefill_cheaper`, ...) or of the miss.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    placement: Placement = "continuous"
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_tier: Literal["ram", "ssd", "none"] = "none"
    cache_reason: str = ""


class CompletionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a completion ended. There is exactly one, after the last event."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    stop_string: str | None = None
    timings: Timings
