"""Looks at the models once a second: token rates, the charts' hour, the loop's own lag."""

import asyncio
from collections.abc import Callable

from mlx_isolate_shared.clock import Clock
from mlx_isolate_supervisor.telemetry.history import SAMPLE_INTERVAL_S, History, Sample
from mlx_isolate_supervisor.telemetry.inflight import FirstTokens
from mlx_isolate_supervisor.telemetry.metrics import Metrics
from mlx_isolate_supervisor.telemetry.status import ModelStatus

TICK_S = 1.0
# A gap this long between two ticks is a machine that slept, not a slow loop.
SLEPT_S = 30.0


class Sampler:
    """Turns snapshots into rates; `tick` is separate from time so that tests can drive it."""

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        history: History,
        first_tokens: FirstTokens,
        snapshot: Callable[[], tuple[ModelStatus, ...]],
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._history = history
        self._first_tokens = first_tokens
        self._snapshot = snapshot
        # The first tick gives the first sample, so that a fresh page has something to show.
        self._sampled_s = clock.monotonic() - SAMPLE_INTERVAL_S
        self._totals: dict[str, tuple[int, int]] = {}

    async def run(self) -> None:
        """Tick for ever; cancelled by its owner."""
        loop = asyncio.get_running_loop()
        due = loop.time() + TICK_S
        while True:
            await asyncio.sleep(due - loop.time())
            late = loop.time() - due
            if late < SLEPT_S:
                self._metrics.loop_lag.observe(max(0.0, late))
            due = loop.time() + TICK_S
            self.tick()

    def tick(self) -> None:
        """Fold the engines' counters; every SAMPLE_INTERVAL_S also add a row to each chart."""
        models = self._snapshot()
        self.fold(models)
        now = self._clock.monotonic()
        # Half a tick of grace, or jitter would stretch every interval by a whole tick.
        if now - self._sampled_s >= SAMPLE_INTERVAL_S - TICK_S / 2:
            self._sample(models, now - self._sampled_s)
            self._sampled_s = now

    def fold(self, models: tuple[ModelStatus, ...]) -> None:
        """Add up counters over incarnations; also called when an engine ends."""
        self._metrics.forget_engines({model.id for model in models})
        for model in models:
            if model.progress is not None:
                self._metrics.of(model.id).fold(model.incarnation, model.progress)

    def _sample(self, models: tuple[ModelStatus, ...], interval_s: float) -> None:
        self._history.retain({model.id for model in models})
        for model in models:
            engine = self._metrics.of(model.id).engine
            totals = (engine["generated_tokens"], engine["prompt_tokens"])
            before = self._totals.get(model.id, totals)
            self._totals[model.id] = totals
            sample = Sample(
                time=round(self._clock.wall(), 1),
                state=model.state,
                tokens_per_s=round((totals[0] - before[0]) / interval_s, 2),
                prompt_tokens_per_s=round((totals[1] - before[1]) / interval_s, 2),
                ttft_s=_rounded(self._first_tokens.take(model.id)),
                footprint_bytes=model.memory_bytes or 0,
                restarts=model.restarts,
                active=model.active,
                queued=model.queued,
            )
            self._history.add(model.id, sample)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
