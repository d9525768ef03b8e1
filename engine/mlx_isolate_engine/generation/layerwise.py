"""mlx-lm's BatchGenerator, with caches that are rebuilt some layers at a time instead of all at once.

Rows that join or leave, and a cache that grows, make new arrays from old ones. mlx-lm leaves their
evaluation to the next pass of the model, which may run ahead of what it can free: the batch then
lies in memory twice, and a third time while prompts turn into rows that generate. Here each layer
is evaluated, and its old arrays freed, before the next one begins.

It overrides private methods of mlx-lm; a test names every one and fails where their text changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from mlx_isolate_engine.cache.kinds import leaves
from mlx_isolate_engine.generation.batch_model import BatchModel
from mlx_isolate_engine.generation.few_shapes import rounded_keys, rounded_tokens

# Layers are evaluated together up to so many bytes, more where each evaluation waits for a GPU; a
# batch of no more is left to the next pass, as mlx-lm does.
TOGETHER = (16 if mx.default_device() == mx.Device(mx.cpu) else 64) << 20
# What a batch needs beside itself: of one group the old arrays, and what is between old and new.
BESIDE_BYTES = 2 * TOGETHER
# Where a layer is larger than a group: of one layer.
BESIDE_LAYERS = 2
# Capacity grows by so many tokens, as mlx-lm's own does.
STEP = BatchKVCache.step
ENDLESS = 1 << 60

# Any: mlx-lm's classes say None where arrays come later.
_GROWING: Any = BatchKVCache
_TURNING: Any = BatchRotatingKVCache


def batch_bytes(free: float, layer_share: float) -> float:
    """Of the largest batch that fits into `free` bytes with what it needs beside itself.

    Args:
        free: bytes.
        layer_share: of the batch's bytes, at most so many are its largest layer's; 0 to 1.
    """
    return min(free - BESIDE_BYTES, free / (1 + BESIDE_LAYERS * layer_share))


class LayerwiseGenerator(BatchGenerator):  # type: ignore[misc]  # mlx-lm has no types
    """A BatchGenerator whose batch needs its own size, and at most two groups of layers beside.

    Args:
        model: of mlx-lm.
        settings: as BatchGenerator takes them.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._prompts: _Prompts = _Prompts.empty(model, self.sampler, self.prefill_step_size)
        self._prompt_batch = self._prompts
        self._generation_batch = _Answers.empty(model, self.sampler)

    @property
    def has_large_prompts(self) -> bool:
        """Whether copying the rows whose prompts run costs more than a pass of the model hides."""
        held: int = sum(part.nbytes for part in self._prompts.prompt_cache)
        return held > TOGETHER

    def _make_batch(self, n: int) -> Any:
        batch = super()._make_batch(n)
        for uid, seen, (_, _, length) in zip(
            batch.uids, batch.tokens, self._currently_processing[-n:], strict=True
        ):
            self._prompts.ends[uid] = len(seen) + length
        return batch


class _Prompts(PromptProcessingBatch):  # type: ignore[misc]  # mlx-lm has no types
    """Rows whose prompts run. `ends`: tokens in each one's cache when its prompt has run.

    Who joins is settled when the next piece runs, with the room for it: mlx-lm calls `prompt` in
    the same step, and two evaluations would copy everybody twice.
    """

    _is_joined = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ends: dict[int, int] = {}

    def extend(self, batch: Any) -> None:
        super().extend(batch)
        self._is_joined = True

    def split(self, indices: list[int]) -> Any:
        if len(indices) < len(self):
            taken = super().split(indices)
        else:  # all of them: nothing to divide, so nothing to copy
            parts: list[Any] = self.prompt_cache
            self.prompt_cache: list[Any] = []
            taken = super().split(indices)
            taken.prompt_cache = parts
        settle(taken.prompt_cache, self.prompt_cache, room=1)
        return taken

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self.ends = {uid: self.ends.get(uid, 0) for uid in self.uids}

    def _copy(self) -> Any:
        copied = super()._copy()
        copied.ends = {}
        return copied

    def prompt(self, tokens: list[list[int]]) -> None:
        lengths = [len(piece) for piece in tokens]
        width = max(lengths, default=0)
        is_joined, self._is_joined = self._is_joined, False
        if not width:
            if is_joined:
                settle(self.prompt_cache)
            return
        lefts = (
            self.ends.get(uid, 0) - len(seen)
            for uid, seen in zip(self.uids, self.tokens, strict=True)
        )
        settle(self.prompt_cache, room=self._room_for(max(width, *lefts), width))
        padding = [width - length for length in lengths]
        if not any(padding):
            super().prompt(tokens)
            return
        for part in self.prompt_cache:
            part.prepare(lengths=lengths, right_padding=padding)
        super().prompt([[*piece, *[0] * pad] for piece, pad in zip(tokens, padding, strict=True)])
        for seen, pad in zip(self.tokens, padding, strict=True):
            del seen[len(seen) - pad :]
        for part in self.prompt_cache:
            part.finalize()
        settle(self.prompt_cache)
        mx.eval([part.state for part in self.prompt_cache])

    def _room_for(self, tokens: int, width: int) -> int:
        """Tokens for which there has to be room, if so many are to run in pieces of `width`."""
        if not (isinstance(self.model, BatchModel) and self.model.few_shapes):
            return tokens
        held = max(
            (each._idx for each in leaves(self.prompt_cache) if isinstance(each, _GROWING)),
            default=0,
        )
        # Only the last piece is rounded: the others are round.
        last = min(tokens, width)
        return rounded_keys(held + tokens - last + rounded_tokens(last)) - held


class _Answers(GenerationBatch):  # type: ignore[misc]  # mlx-lm has no types
    """Rows that generate.

    mlx-lm hands out the log probabilities of the whole vocabulary with every token. Nobody takes
    them here (who wants some has `LogprobSampler`), and each row's would be one more array to make,
    to wait for and to hold in every step.
    """

    _is_changed = False
    _steps_left = 0
    # mlx-lm says that these may be None; a batch with rows has them.
    _next_tokens: Any
    samplers: Any
    logits_processors: Any

    def extend(self, batch: Any) -> None:
        self._is_changed = self._is_changed or bool(self.uids)
        self._steps_left = 0
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._is_changed = bool(keep)
        if not keep:
            self._current_tokens: Any = None
            self._current_logprobs: list[Any] = []

    def _step(self) -> tuple[list[int], list[Any]]:
        if self._is_changed or self._steps_left <= 0:
            if self._is_changed or not _room(self.prompt_cache):
                settle(self.prompt_cache, room=1)
            self._is_changed = False
            self._steps_left = _room(self.prompt_cache)
        self._steps_left -= 1
        tokens = self._next_tokens
        contexts: list[Any] = []
        logits = self.model(tokens[:, None], cache=self.prompt_cache)[:, -1, :]
        if any(self.logits_processors):
            logits = self._processed(logits, tokens, contexts)
        self._current_tokens, self._next_tokens = tokens, self._drawn(logits)
        nothing: list[Any] = [None] * len(self.uids)
        self._current_logprobs, self._next_logprobs = nothing, nothing.copy()
        schedule: Any = mx.async_eval
        schedule(self._next_tokens, contexts)
        values: list[int] = tokens.tolist()  # waits for the step before, without the interpreter
        for seen, value in zip(self.tokens, values, strict=True):
            seen.append(value)
        return values, nothing

    def _processed(self, logits: Any, tokens: Any, contexts: list[Any]) -> Any:
        """Logits after each row's processors; what they have seen grows by its token."""
        rows: list[Any] = []
        for place, processors in enumerate(self.logits_processors):
            row = logits[place : place + 1]
            if processors:
                context = self._token_context[place].update_and_fetch(tokens[place : place + 1])
                contexts.append(context)
                for processor in processors:
                    row = processor(context, row)
            rows.append(row)
        return mx.concatenate(rows)

    def _drawn(self, logits: Any) -> Any:
        """The next token of each row; those who share a sampler draw together."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        samplers: list[Any] = [each or self.fallback_sampler for each in self.samplers]
        if all(each is samplers[0] for each in samplers):
            return samplers[0](logprobs)
        rows = enumerate(samplers)
        return mx.concatenate([draw(logprobs[place : place + 1]) for place, draw in rows])


def settle(*caches: Sequence[Any], room: int = 0) -> None:
    """Evaluate caches layer by layer, with room for so many more tokens.

    Args:
        caches: of batches that were made from each other: their first layers go together.
        room: tokens.
    """
    if sum(part.nbytes for cache in caches for part in cache) <= TOGETHER:
        return
    group: list[Any] = []
    for part in _layers(caches):
        if group and sum(each.nbytes for each in group) + part.nbytes > TOGETHER:
            mx.eval([each.state for each in group])
            group = []
        for leaf in leaves([part]):
            _make_room(leaf, room)
        group.append(part)
    mx.eval([each.state for each in group])


def _layers(caches: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for place in range(max(map(len, caches), default=0)):
        for cache in caches:
            if place < len(cache):
                yield cache[place]


def _make_room(leaf: Any, room: int) -> None:
    """Do what the next write of `room` tokens would do to the arrays; nothing is evaluated."""
    if getattr(leaf, "keys", None) is None:
        return
    size = leaf.keys.shape[2]
    if isinstance(leaf, _GROWING):
        needed = leaf._idx + room
        if needed > size:
            _grow(leaf, -(-needed // STEP) * STEP - size)
    elif isinstance(leaf, _TURNING) and room == 1:
        if size > leaf.max_size:  # what a prefill left before the window
            front = size - leaf.max_size
            leaf.keys = mx.contiguous(leaf.keys[..., front:, :])
            leaf.values = mx.contiguous(leaf.values[..., front:, :])
            leaf.left_padding = leaf.left_padding - front
            leaf._idx = leaf.max_size
        elif leaf._offset >= size and size < leaf.max_size:
            _grow(leaf, min(STEP, leaf.max_size - size))
            leaf._idx = leaf._offset


def _grow(leaf: Any, tokens: int) -> None:
    widths = [(0, 0), (0, 0), (0, tokens), (0, 0)]
    leaf.keys, leaf.values = mx.pad(leaf.keys, widths), mx.pad(leaf.values, widths)


def _room(cache: Sequence[Any]) -> int:
    """Decode steps until a layer has to be rebuilt."""
    return min(map(_room_of, leaves(cache)), default=ENDLESS)


def _room_of(leaf: Any) -> int:
    if getattr(leaf, "keys", None) is None:
        return ENDLESS
    size: int = leaf.keys.shape[2]
    if isinstance(leaf, _GROWING):
        return max(0, size - int(leaf._idx))
    if isinstance(leaf, _TURNING) and size != leaf.max_size:
        return max(0, size - int(leaf._offset)) if size < leaf.max_size else 0
    return ENDLESS
