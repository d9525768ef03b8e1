"""Clients of the serving bench: streaming chats side by side, timed at the client's socket."""

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

WORDS = ("alpha", "river", "stone", "cloud", "amber", "north", "field", "quiet", "glass", "ember")


@dataclass(frozen=True)
class Turn:
    """One turn of one rival: what its clients saw.

    Attributes:
        ttft_ms: median time to the first piece of text.
        tokens_per_s: tokens of all clients by the time that they all took.
        gap_p99_ms: 99th percentile of the time between two pieces of one stream.
    """

    ttft_ms: float
    tokens_per_s: float
    gap_p99_ms: float


def prompt(number: int, words: int, *, warm: bool) -> list[dict[str, str]]:
    """Messages of about `words` words; warm ones share all but the last few of them."""
    shared = " ".join(WORDS[place % len(WORDS)] for place in range(words))
    if warm:
        return [
            {"role": "system", "content": shared},
            {"role": "user", "content": f"number {number}, please"},
        ]
    return [{"role": "user", "content": f"{number} is my number: {shared}"}]


async def turn(url: str, model: str, prompts: list[list[dict[str, str]]], tokens: int) -> Turn:
    """Ask every prompt at once, each on a connection of its own, and time the answers."""
    began = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        arrivals = await asyncio.gather(
            *(_one(session, url, model, messages, tokens) for messages in prompts)
        )
    took_s = time.perf_counter() - began
    gaps = [
        later - earlier for times in arrivals for earlier, later in itertools.pairwise(times[1:])
    ]
    return Turn(
        ttft_ms=statistics.median(times[1] - times[0] for times in arrivals) * 1000,
        tokens_per_s=tokens * len(prompts) / took_s,
        gap_p99_ms=sorted(gaps)[int(len(gaps) * 0.99)] * 1000 if gaps else 0.0,
    )


async def _one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: list[dict[str, str]],
    tokens: int,
) -> list[float]:
    """When the request was sent, then when each piece of text came."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times = [time.perf_counter()]
    made = 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    times.append(time.perf_counter())
                made = (event.get("usage") or {}).get("completion_tokens", made)
    # Not the reason of the end: some say "stop" of every answer.
    assert made == tokens, f"the answer has {made} tokens"
    return times
