"""What a GPU runs before the engine is ready: each shape of prefill and decode once, and the rate.

A GPU prepares kernels for every new shape, for many seconds in all; nobody should wait for that in
a request. On a CPU there is nothing to prepare, and the same passes would only cost time.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from mlx_isolate_engine.generation import few_shapes
from mlx_isolate_engine.generation.pacing import SMALLEST_ALLOWANCE, PrefillPace
from mlx_isolate_engine.generation.sampling import Sampler
from mlx_isolate_shared.clock import Clock

log = logging.getLogger(__name__)

# Begins nothing more after so long: an engine that answers slowly at first is better than none.
REHEARSAL_S = 45.0
# An engine that follows a dead one has clients waiting: what its commonest shapes take, no more.
RESPAWN_S = 2.0
# A pass that would take longer than this, by the rate of the ones before, is left out: where a
# machine is so slow, its first passes cost nothing beside the others.
PASS_S = 1.0
# Every shape runs so often: once to be prepared, once more to be measured.
TURNS = 2
DECODE_ROWS = 16
# Tokens of a prompt of which only the decode steps matter, and decode steps of each batch size.
DECODE_PROMPT = 16
DECODE_STEPS = 3
# Tokens of a prompt's last piece: fewer than kernels for wide ones take, more than those for one.
SHORT_PIECE = 80


def is_worthwhile() -> bool:
    """Whether this process computes on a GPU."""
    return bool(mx.default_device() != mx.Device(mx.cpu))


def widths(step_size: int, length_max: int) -> list[int]:
    """Prefill widths to run, rising: the step size, halved down to the smallest piece."""
    width = step_size
    found: list[int] = []
    while width >= SMALLEST_ALLOWANCE:
        if width < length_max:
            found.append(width)
        width //= 2
    return found[::-1]


def widths_between(step_size: int, length_max: int) -> list[int]:
    """The other widths, rising, in which a prompt runs where shapes are few (see few_shapes.py)."""
    most = min(step_size, length_max - 1)
    rounded = {few_shapes.rounded_tokens(width) for width in range(SMALLEST_ALLOWANCE, most + 1)}
    return sorted(each for each in rounded - {*widths(step_size, length_max)} if each <= most)


def lives(rows: int) -> list[int]:
    """Tokens of each row of one batch, so that its size halves step by step down to one."""
    tokens: list[int] = []
    steps = 1 + DECODE_STEPS
    while rows > 1:
        leaving = rows - rows // 2
        tokens += [steps] * leaving
        rows -= leaving
        steps += DECODE_STEPS
    return [*tokens, *[steps] * rows]


class Rehearsal:
    """Runs a generator that has no rows yet.

    Args:
        generator: the lane's.
        pace: learns the rate.
        sampler: any that draws, for its kernels.
        clock: times the passes.
    """

    def __init__(
        self, generator: BatchGenerator, pace: PrefillPace, sampler: Sampler, clock: Clock
    ) -> None:
        self._generator: Any = generator
        self._pace = pace
        self._sampler = sampler
        self._clock = clock

    def run(self, *, rows_max: int, length_max: int, seconds_max: float = REHEARSAL_S) -> None:
        """Decode in batches of 16, 8, 4, 2 and 1 rows, then prefill in every width.

        Batches whose rows need padding take other kernels, and so they run too. Last come what
        only a prompt of some lengths meets: an engine in a hurry leaves that to it.

        Args:
            rows_max: rows that a batch may have.
            length_max: tokens that the model takes.
            seconds_max: no pass begins after so long.
        """
        rows = min(DECODE_ROWS, rows_max)
        began = self._clock.monotonic()
        for rehearse in self._passes(rows, length_max):
            if self._clock.monotonic() - began > seconds_max:
                break
            rehearse()
        mx.clear_cache()
        log.info("engine.rehearsed seconds=%.1f", self._clock.monotonic() - began)

    def _passes(self, rows: int, length_max: int) -> Iterator[Callable[[], None]]:
        """What to run, in order; asked for the next one only when the one before has run."""
        yield lambda: self._decode([DECODE_PROMPT] * rows)
        if rows > 1:
            yield lambda: self._decode([DECODE_PROMPT + place % 2 for place in range(rows)])
        for width in widths(self._pace.step_size, length_max):
            for _ in range(TURNS):
                if not self._is_too_slow(width):
                    yield partial(self._prefill, width)
        if rows > 1:
            yield self._join
        for width in self._continued(length_max):
            yield partial(self._continue, width)
        if getattr(self._generator.model, "few_shapes", False):
            for width in widths_between(self._pace.step_size, length_max):
                if not self._is_too_slow(width):
                    yield partial(self._prefill, width)

    def _is_too_slow(self, width: int) -> bool:
        return self._pace.is_measured and self._pace.seconds(width) > PASS_S

    def _prefill(self, width: int) -> None:
        self._insert([width + 1], [1])
        self._generator.prefill_step_size = width
        before = self._clock.monotonic()
        self._generator.next()
        self._pace.observe(1, width, self._clock.monotonic() - before)
        self._drain()

    def _continued(self, length_max: int) -> list[int]:
        """The width in which a long prompt runs, if there is one."""
        found = [
            width
            for width in widths(self._pace.step_size, length_max)
            if 2 * width + SHORT_PIECE < length_max and not self._is_too_slow(width)
        ]
        return found[-1:]

    def _continue(self, width: int) -> None:
        """A long prompt: its later pieces see more than themselves, and the last is a short one."""
        self._insert([2 * width + SHORT_PIECE + 1], [1])
        self._generator.prefill_step_size = width
        self._drain()

    def _decode(self, lengths: list[int]) -> None:
        self._insert(lengths, lives(len(lengths)))
        self._generator.prefill_step_size = DECODE_PROMPT
        self._drain()

    def _join(self) -> None:
        """A prompt joins one that has run in part, and so is padded."""
        self._generator.prefill_step_size = DECODE_PROMPT
        for pieces in (3, 2):
            self._insert([pieces * DECODE_PROMPT], [1])
            self._generator.next()
        self._drain()

    def _insert(self, lengths: list[int], tokens: list[int]) -> None:
        self._generator.insert(
            [[0] * length for length in lengths],
            max_tokens=tokens,
            samplers=[self._sampler] * len(lengths),
            stop_sequences=[StopSequences()] * len(lengths),
        )

    def _drain(self) -> None:
        while any(self._generator.next()):
            pass
