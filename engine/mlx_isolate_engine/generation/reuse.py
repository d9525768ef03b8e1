"""Prefix reuse as both lanes do it: what a row begins with, and what it leaves behind."""

from collections.abc import Generator, Sequence
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from mlx_isolate_engine.generation.plan import Checkpoint, PromptPlan
from mlx_isolate_engine.generation.ports import EntryKind, PromptCache
from mlx_isolate_engine.generation.quantization import begins_at, namespace_at
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_shared.config import EngineSettings

# A cache that can be cut serves every prefix, but only once its completion has ended. The system
# prompt is what others are waiting for meanwhile: parallel agents share it.
CUTTABLE_KINDS: frozenset[EntryKind] = frozenset({"system"})
ALL_KINDS: frozenset[EntryKind] = frozenset({"system", "history", "prompt"})

Found = tuple[list[Any] | None, int]


class PrefixReuse:
    """The prompt cache, or its absence.

    Args:
        cache: None = every prompt runs in full and nothing is kept.
        empty: a cache of the model with nothing in it, to tell its kind.
        settings: KV quantization and step size.
    """

    def __init__(
        self, cache: PromptCache | None, empty: Sequence[Any], settings: EngineSettings
    ) -> None:
        self._cache = cache
        self._settings = settings
        self.checkpoint_kinds: frozenset[EntryKind] = frozenset()
        if cache is not None:
            wants_all = cache.wants_checkpoint(empty)
            self.checkpoint_kinds = ALL_KINDS if wants_all else CUTTABLE_KINDS

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._cache is not None

    def expect(self, row: Row) -> int:
        """Tokens of the row's prompt that need not run, as far as memory knows just now.

        For caches in full precision; others are never asked about ahead.
        """
        if self._cache is None:
            return 0
        if row.expectation is None:
            row.expectation = self._cache.expect(row.plan.prompt.tokens, row.plan.namespace)
        return row.expectation()

    def find(self, row: Row) -> Generator[None, None, Found]:
        """The row's cached prefix and its length; yields while it comes from disk."""
        if self._cache is None:
            return None, 0
        found = yield from self._find(self._cache, row)
        row.taken = self._cache.last_take
        return found

    def _find(self, cache: PromptCache, row: Row) -> Generator[None, None, Found]:
        tokens, namespace = row.plan.prompt.tokens, row.plan.namespace
        if self._settings.kv_bits is None:
            return (yield from cache.take_stepwise(tokens, namespace))
        begin = self._begins_at(row.plan.prompt)
        found = yield from cache.take_stepwise(
            tokens, namespace_at(namespace, begin), length_min=begin, is_last_try=False
        )
        if found[0] is not None:
            return found
        # State in full precision is the same for every prompt, as long as it would still be so.
        length_max = max(0, self._settings.quantized_kv_start - 1)
        return (yield from cache.take_stepwise(tokens, namespace, length_max=length_max))

    def _begins_at(self, prompt: PromptPlan) -> int:
        return begins_at(
            len(prompt.tokens),
            start=self._settings.quantized_kv_start,
            step=self._settings.prefill_step_size,
        )

    def checkpoints(self, prompt: PromptPlan, reused: int) -> list[Checkpoint]:
        """Where a prefill pauses: asked-for places, and always before the last token."""
        last = len(prompt.tokens) - 1
        ends = [
            each
            for each in prompt.checkpoints
            if reused < each.end < last
            and each.kind in self.checkpoint_kinds
            and not self._would_quantize(prompt, each.end)
        ]
        if last > reused:
            ends.append(Checkpoint(end=last, kind="prompt"))
        return ends

    def _would_quantize(self, prompt: PromptPlan, end: int) -> bool:
        """Whether a pause at `end` would make quantization begin there, before its place."""
        start = max(1, self._settings.quantized_kv_start)
        return self._settings.kv_bits is not None and start <= end < self._begins_at(prompt)

    def keep(self, row: Row, tokens: Sequence[int], cache: Sequence[Any], kind: EntryKind) -> None:
        """Leave a row's cache, which holds `tokens`, to later prompts."""
        if self._cache is not None and tokens:
            namespace = row.plan.namespace
            if any(isinstance(part, QuantizedKVCache) for part in cache):
                namespace = namespace_at(namespace, self._begins_at(row.plan.prompt))
            self._cache.put(tokens, cache, namespace, kind)

    def keep_checkpoint(
        self, row: Row, tokens: Sequence[int], cache: Sequence[Any], kind: EntryKind
    ) -> None:
        """The same in the middle of a completion, where it is of use."""
        if kind in self.checkpoint_kinds:
            self.keep(row, tokens, cache, kind)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """How fast prompts run, for the choice between restoring and running."""
        if self._cache is not None:
            self._cache.note_prefill(tokens, seconds)
