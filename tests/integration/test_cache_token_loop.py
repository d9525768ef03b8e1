"""The token loop and the cold tier have nothing to do with each other."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.completion.events import ContentDelta, Event
from mlx_isolate_engine.generation.ports import EntryKind
from tests.fakes.fake_cold_tier import FakeColdTier
from tests.integration.generation_rig import chat_request, rig, run_async


class WatchedTier(FakeColdTier):
    """Notes every call with the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("find", "has", "restore", "store", "touch", "remove", "stats"):
            self.calls.append((name, threading.current_thread().name))
        return super().__getattribute__(name)

    def made_while_generating(self) -> list[str]:
        """Calls so far but for figures, which the event loop may read at any time."""
        return [name for name, _ in self.calls if name != "stats"]


class TimedCache(PromptCache):
    """Notes how long each act of keeping takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.put_s: list[float] = []

    def put(
        self, tokens: Sequence[int], cache: Sequence[Any], namespace: str, kind: EntryKind
    ) -> None:
        start = time.perf_counter()
        super().put(tokens, cache, namespace, kind)
        self.put_s.append(time.perf_counter() - start)


def test_between_the_first_and_the_last_token_the_cold_tier_is_not_called(
    full_model: Path,
) -> None:
    tier = WatchedTier()
    cold = ColdSettings(
        tier=tier, choice=RestoreChoice("always"), spill_bytes_max=1 << 28, debounce_s=0.0
    )
    cache = PromptCache(entries_max=9, bytes_max=1 << 28, cold=cold)
    seen: list[list[str]] = []

    async def note(event: Event) -> None:
        if isinstance(event, ContentDelta):
            seen.append(tier.made_while_generating())

    async def main() -> None:
        async with rig(full_model, make_prompt_cache=lambda _: cache) as running:
            await running.run(chat_request("something dirty", max_tokens=8))
            await running.run(chat_request("a long answer", max_tokens=120), watch=note)
            await running.wait_idle()
            assert (await asyncio.to_thread(cache.flush, 20)).durable

    run_async(main())
    cache.close(10)
    assert len(seen) > 50
    # The last deltas may be seen after the end of the generation, so they prove nothing.
    assert seen[1] == seen[-20]
    assert {thread for name, thread in tier.calls if name == "store"} == {"cache-writer"}


def test_keeping_a_completion_is_one_short_act(full_model: Path) -> None:
    """The one evaluation at the end of a completion, on the generation thread, by itself."""
    cache = TimedCache(entries_max=9, bytes_max=1 << 28)

    async def main() -> None:
        async with rig(full_model, make_prompt_cache=lambda _: cache) as running:
            for number in range(8):
                await running.run(chat_request(f"question {number}", max_tokens=40))

    run_async(main())
    # A row of this model has 100 kB; the bound leaves room for a busy machine, not for a rewrite.
    assert cache.put_s and max(cache.put_s) < 0.5
