"""OpenAI objects that its chat and text completions share: usage, timings, logprobs, errors."""

from collections.abc import Sequence
from typing import Any

import msgspec

from mlx_isolate_engine.completion.events import CompletionSummary, TokenLogprob
from mlx_isolate_engine.protocols.contract import Call

# OpenAI's stand-in for the logarithm of 0.
LOGPROB_MIN = -9999.0
DONE = b"data: [DONE]\n\n"


def sse(payload: Any) -> bytes:
    """One unnamed SSE event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def comment_keepalive(done: int, total: int) -> bytes:
    """A comment that any SSE parser skips."""
    return b": keepalive %d/%d\n\n" % (done, total)


def head(answer_id: str, kind: str, call: Call, adapter: str | None) -> dict[str, Any]:
    """The fields that every answer and every chunk begins with."""
    return {
        "id": answer_id,
        "object": kind,
        "created": call.created,
        "model": call.identity.model,
        "system_fingerprint": call.identity.fingerprint_with(adapter),
    }


def usage(per_prompt: Sequence[Sequence[CompletionSummary]]) -> dict[str, Any]:
    """Token counts of an answer.

    Args:
        per_prompt: for each prompt of the request the summaries of its choices; a prompt counts
            once however many choices it has.
    """
    prompt = sum(choices[0].prompt_tokens for choices in per_prompt)
    cached = sum(choices[0].cached_tokens for choices in per_prompt)
    every = [summary for choices in per_prompt for summary in choices]
    completion = sum(summary.completion_tokens for summary in every)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(summary.reasoning_tokens for summary in every)
        },
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat API's logprobs object."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        **_candidate(token),
        "top_logprobs": [_candidate(other) for other in token.top],
    }


def _finite(logprob: float) -> float:
    """A number that JSON has: a token that is forbidden has the probability 0."""
    return max(logprob, LOGPROB_MIN)


def _candidate(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The completions API's logprobs object; `offset` is where the first token's text begins."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {other.token: _finite(other.logprob) for other in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }
