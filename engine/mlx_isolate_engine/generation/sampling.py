"""From resolved settings to mlx-lm's samplers and logits processors, one set for each row.

Nothing here is compiled: mlx compiles each new constant (a top_p that nobody has used) for up to a
second on a CPU, in the middle of everybody's stream.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors

from mlx_isolate_engine.generation.plan import SamplingPlan

# mlx arrays are untyped here.
Array = Any
Sampler = Callable[[Array], Array]
Processor = Callable[[Array, Array], Array]

# Below this a temperature is greedy in all but name, and dividing by it leaves float32.
GREEDY_BELOW = 1e-5
# Settings remembered for sharing one sampler between rows; without a limit every new temperature
# would stay for ever.
SHARED_SAMPLERS_MAX = 64

_MASK64 = (1 << 64) - 1


class DrawKeys:
    """PRNG keys of one sequence of draws, by number: the same whatever else is drawn.

    Args:
        seed: unsigned 64 bit; None takes one from the system's entropy.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = int.from_bytes(os.urandom(8)) if seed is None else seed & _MASK64

    def next(self) -> Array:
        """The next key (splitmix64 of the seed)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK64
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        return mx.random.key(mixed ^ (mixed >> 31))


class RandomSampler:
    """Draws tokens from filtered, tempered log probabilities.

    Args:
        plan: settings with a temperature above 0.
        spared: token ids that XTC never removes (end of text, newline).
        vocabulary_size: width of the log probabilities.
    """

    def __init__(self, plan: SamplingPlan, spared: Sequence[int], vocabulary_size: int) -> None:
        self._keys = DrawKeys(plan.seed)
        self._scale = 1.0 / plan.temperature
        self._filters: list[Sampler] = []
        if plan.top_p < 1.0:
            self._filters.append(lambda values: keep_top_p(values, plan.top_p))
        if plan.min_p > 0.0:
            self._filters.append(lambda values: keep_min_p(values, plan.min_p))
        if plan.xtc_probability > 0.0:
            spare = [False] * vocabulary_size
            for token in spared:
                if token < vocabulary_size:
                    spare[token] = True
            self._filters.append(_Xtc(plan, mx.array(spare), self._keys))
        if 0 < plan.top_k < vocabulary_size:
            self._filters.append(lambda values: keep_top_k(values, plan.top_k))

    def __call__(self, logprobs: Array) -> Array:
        """[rows, vocabulary] to [rows]; each row draws for itself."""
        values = logprobs.astype(mx.float32)
        for keep in self._filters:
            values = keep(values)
        return mx.random.categorical(values * self._scale, key=self._keys.next())


def keep_top_p(logprobs: Array, top_p: float) -> Array:
    """Keep the likeliest tokens that together hold `top_p` of the mass, at least one."""
    falling = -mx.sort(-logprobs, axis=-1)
    mass = mx.cumsum(mx.exp(falling), axis=-1)
    before = mass - mx.exp(falling)
    kept = mx.maximum((before < top_p * mass[..., -1:]).sum(axis=-1, keepdims=True), 1)
    least = mx.take_along_axis(falling, kept - 1, axis=-1)
    return mx.where(logprobs < least, -mx.inf, logprobs)


def keep_min_p(logprobs: Array, min_p: float) -> Array:
    """Keep tokens at least `min_p` times as likely as the likeliest."""
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logprobs < least, -mx.inf, logprobs)


def keep_top_k(logprobs: Array, top_k: int) -> Array:
    """Keep the `top_k` likeliest tokens, and those as likely as the last of them."""
    least = mx.min(mx.topk(logprobs, top_k, axis=-1), axis=-1, keepdims=True)
    return mx.where(logprobs < least, -mx.inf, logprobs)


class _Xtc:
    """Removes, some of the time, every token above a probability but the least likely of them."""

    def __init__(self, plan: SamplingPlan, spare: Array, keys: DrawKeys) -> None:
        self._probability = plan.xtc_probability
        self._threshold = plan.xtc_threshold
        self._spare = spare
        self._keys = keys

    def __call__(self, logprobs: Array) -> Array:
        probabilities = mx.softmax(logprobs, axis=-1)
        likely = mx.where(probabilities > self._threshold, probabilities, mx.inf)
        remove = (probabilities > likely.min(axis=-1, keepdims=True)) & ~self._spare
        draw = mx.random.uniform(shape=(logprobs.shape[0], 1), key=self._keys.next())
        remove = remove & (draw <= self._probability)
        return mx.where(remove, -mx.inf, logprobs)


class GuardedSampler:
    """Keeps an exception in a sampler from ending everybody's step.

    The failed call gives a harmless answer, so that the batch stays consistent; whoever takes the
    next token of a row with this sampler sees `error` and fails that row alone.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def __call__(self, logprobs: Array) -> Array:
        """What `inner` draws, or the likeliest tokens once it has raised."""
        if self.error is None:
            try:
                return self._inner(logprobs)
            except Exception as error:  # noqa: BLE001 - the top frame of this row
                self.error = error
        return mx.argmax(logprobs, axis=-1)


class GuardedProcessor:
    """The same for a logits processor."""

    def __init__(self, inner: Processor) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def __call__(self, tokens: Array, logits: Array) -> Array:
        """What `inner` makes of the logits, or the logits as they are once it has raised."""
        if self.error is None:
            try:
                return self._inner(tokens, logits)
            except Exception as error:  # noqa: BLE001 - the top frame of this row
                self.error = error
        return logits


# Greedy rows all share this one.
GREEDY = GuardedSampler(greedy_sampler)


class SamplerMaker:
    """Makes each row's sampler; rows that may share one get the same object.

    mlx-lm samples a batch in one call if all its rows have the same sampler object.

    Args:
        vocabulary_size: width of the model's output.
        spared: token ids that XTC never removes.
    """

    def __init__(self, vocabulary_size: int, spared: Sequence[int]) -> None:
        self._vocabulary_size = vocabulary_size
        self._spared = tuple(spared)
        self._shared: dict[SamplingPlan, GuardedSampler] = {}

    def make(self, plan: SamplingPlan) -> GuardedSampler:
        """The sampler for a row."""
        if plan.temperature < GREEDY_BELOW:
            return GREEDY
        if plan.seed is not None:
            return self._new(plan)
        # Unseeded rows with equal settings share one stream of draws.
        key = SamplingPlan(
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            min_p=plan.min_p,
            xtc_probability=plan.xtc_probability,
            xtc_threshold=plan.xtc_threshold,
        )
        sampler = self._shared.get(key)
        if sampler is None or sampler.error is not None:
            if len(self._shared) >= SHARED_SAMPLERS_MAX:
                self._shared.clear()
            sampler = self._shared[key] = self._new(key)
        return sampler

    def _new(self, plan: SamplingPlan) -> GuardedSampler:
        return GuardedSampler(RandomSampler(plan, self._spared, self._vocabulary_size))


def make_processors(plan: SamplingPlan) -> list[GuardedProcessor]:
    """mlx-lm's logits processors for a row; [] for most."""

    def active(penalty: float, neutral: float, size: int) -> float | None:
        # A context of 0 tokens would be read as the whole context.
        return penalty if penalty != neutral and size > 0 else None

    processors: list[Processor] = make_logits_processors(
        logit_bias=dict(plan.logit_bias) or None,
        repetition_penalty=active(plan.repetition_penalty, 1.0, plan.repetition_context_size),
        repetition_context_size=plan.repetition_context_size,
        presence_penalty=active(plan.presence_penalty, 0.0, plan.presence_context_size),
        presence_context_size=plan.presence_context_size,
        frequency_penalty=active(plan.frequency_penalty, 0.0, plan.frequency_context_size),
        frequency_context_size=plan.frequency_context_size,
    )
    return [GuardedProcessor(each) for each in processors]
