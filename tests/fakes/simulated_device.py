"""The continuous lane on a device of any speed: real generator and policies, a model that only costs time.

Every pass of the model moves a clock by what it would take there; nothing else does.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import ContentDelta, Event
from mlx_isolate_engine.generation.admission import Room
from mlx_isolate_engine.generation.continuous import ContinuousLane
from mlx_isolate_engine.generation.counters import Counters
from mlx_isolate_engine.generation.lane import LaneParts
from mlx_isolate_engine.generation.outbox import Deliveries, End, Outbox
from mlx_isolate_engine.generation.plan import CompletionPlan, PromptPlan, SamplingPlan, TextPlan
from mlx_isolate_engine.generation.ports import EntryKind
from mlx_isolate_engine.generation.rehearsal import REHEARSAL_S
from mlx_isolate_engine.generation.reuse import PrefixReuse
from mlx_isolate_engine.generation.row import ModelFamily
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.config import EngineSettings
from tests.integration.generation_rig import load_tiny
from tests.material.models import ModelSpec, build_model

LETTER = 70
STEPS_MAX = 100_000


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a device is.

    Attributes:
        tokens_per_s: of prefill, at full width.
        pass_s: what every pass costs beside its tokens.
        new_shape_s: what the first pass of a shape costs on top.
    """

    tokens_per_s: float
    pass_s: float
    new_shape_s: float = 0.0


FAST_GPU = Speed(tokens_per_s=100_000, pass_s=0.005, new_shape_s=0.3)
SMALL_CPU = Speed(tokens_per_s=1_500, pass_s=0.01)


@dataclass(frozen=True)
class Pass:
    """One pass of the model: when it began, in seconds, and its shape."""

    at: float
    rows: int
    width: int


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class _Model:
    """Says one letter for ever, in as much time as the device takes."""

    def __init__(self, speed: Speed, clock: _Clock, vocabulary_size: int) -> None:
        self.layers = [None]
        self.passes: list[Pass] = []
        self._speed = speed
        self._clock = clock
        row = [0.0] * vocabulary_size
        row[LETTER] = 1.0
        self._logits = mx.array(row)
        self._seen: set[tuple[int, int]] = set()

    def __call__(self, tokens: Any, cache: Sequence[Any]) -> Any:
        rows, width = tokens.shape
        keys = mx.zeros((rows, 1, width, 1))
        cache[0].update_and_fetch(keys, keys)
        self.passes.append(Pass(self._clock.now, rows, width))
        self._clock.now += self._speed.pass_s + rows * width / self._speed.tokens_per_s
        if (rows, width) not in self._seen:
            self._seen.add((rows, width))
            self._clock.now += self._speed.new_shape_s
        return mx.broadcast_to(self._logits, (rows, width, self._logits.size))


class _Deliveries(Deliveries):
    """Notes when each outbox got its first text, and when each of its later pieces."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(asyncio.new_event_loop())
        self._loop.close()  # nobody reads
        self._clock = clock
        self._fresh: list[Outbox] = []
        self.texts: dict[Outbox, list[float]] = {}
        self.ended: set[Outbox] = set()

    def add(self, outbox: Outbox, events: list[Event]) -> None:
        if any(isinstance(event, ContentDelta) for event in events):
            self._fresh.append(outbox)

    def end(self, outbox: Outbox, end: End) -> None:
        self.ended.add(outbox)

    def flush(self) -> None:
        for outbox in self._fresh:
            self.texts.setdefault(outbox, []).append(self._clock.now)
        self._fresh.clear()


class _SlowPromptCache(PromptCache):
    """Takes its time to keep a row."""

    def __init__(self, clock: _Clock, seconds: float) -> None:
        super().__init__(entries_max=100, bytes_max=None)
        self._clock = clock
        self._seconds = seconds

    def put(
        self, tokens: Sequence[int], cache: Sequence[Any], namespace: str, kind: EntryKind
    ) -> None:
        super().put(tokens, cache, namespace, kind)
        self._clock.now += self._seconds


@dataclass
class Asked:
    """One request: when it came, and when its text did."""

    ticket: Ticket
    at: float
    texts: list[float] = field(default_factory=lambda: list[float]())

    @property
    def first_token_s(self) -> float:
        return self.texts[0] - self.at

    @property
    def largest_gap_s(self) -> float:
        return max(b - a for a, b in zip(self.texts, self.texts[1:], strict=False))


class SimulatedLane:
    """A lane on a simulated device.

    Args:
        folder: where a tiny model's tokenizer is put.
        speed: of the device.
        rehearsed: whether every shape has been run before, as on a GPU; a number = the seconds given.
        cached: whether prompts are kept in a cache of their own; without it nothing is.
        room: memory for rows; None = not limited.
        seconds_to_keep: what it takes to keep a row in that cache.
        few_shapes: whether prompts run in few shapes, as on CUDA, whatever runs the test.
        settings: the engine's, where they differ from the defaults.
    """

    def __init__(
        self,
        folder: Path,
        speed: Speed,
        *,
        rehearsed: bool | float = False,
        cached: bool = False,
        room: Room | None = None,
        seconds_to_keep: float = 0.0,
        few_shapes: bool = False,
        **settings: Any,
    ) -> None:
        tokenizer = load_tiny(build_model(folder / "model", ModelSpec(kind="full"))).tokenizer
        size = len(tokenizer.get_vocab())
        chosen = EngineSettings(**settings)
        self.clock = _Clock()
        self.counters = Counters()
        self.model = _Model(speed, self.clock, size)
        self._deliveries = _Deliveries(self.clock)
        empty = make_prompt_cache(self.model)  # pyright: ignore[reportArgumentType]
        cache = _SlowPromptCache(self.clock, seconds_to_keep) if cached else None
        parts = LaneParts(
            model=self.model,
            draft=None,
            adapters=None,
            family=ModelFamily(tokenizer, size),
            settings=chosen,
            reuse=PrefixReuse(cache, empty, chosen),
            counters=self.counters,
            deliveries=self._deliveries,
            clock=self.clock,
        )
        self.lane = ContinuousLane(parts, room, few_shapes=few_shapes)
        if rehearsed:
            self.lane.rehearse(1 << 20, REHEARSAL_S if rehearsed is True else rehearsed)
        self.rehearsal = list(self.model.passes)
        self.model.passes.clear()

    def ask(self, tokens: int, max_tokens: int = 4, end: str = "", **fields: Any) -> Asked:
        """Submit a prompt of so many tokens and of `end` now; `fields` are others of the plan."""
        plan = CompletionPlan(
            request_id="simulated",
            prompt=PromptPlan(tokens=[LETTER] * tokens + [ord(letter) for letter in end]),
            max_tokens=max_tokens,
            sampling=SamplingPlan(),
            text=TextPlan(),
            **fields,
        )
        asked = Asked(Ticket(plan), self.clock.now)
        self._deliveries.texts[asked.ticket.outbox] = asked.texts
        self.lane.submit(asked.ticket)
        return asked

    def step(self) -> None:
        """One step of the lane."""
        self.lane.step()
        self._deliveries.flush()

    def finish(self, *asked: Asked) -> None:
        """Steps until all of these have ended."""
        for _ in range(STEPS_MAX):
            if all(each.ticket.outbox in self._deliveries.ended for each in asked):
                return
            self.step()
        raise AssertionError("it does not end")

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """Rows and width of every pass of prefill so far."""
        return [(each.rows, each.width) for each in self.model.passes if each.width > 1]
