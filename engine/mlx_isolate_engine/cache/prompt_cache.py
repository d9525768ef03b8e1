"""The prompt cache as the generation lanes see it: `take` before a prefill, `put` after.

Everything here runs on the generation thread except `figures`, which any thread may read. Nobody
outside knows how many tiers there are. A cache that cannot be used is a miss, never an error.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlx_isolate_engine.cache import kinds, snapshot
from mlx_isolate_engine.cache.ram_tier import Entry, EntryKind, RamTier
from mlx_isolate_engine.cache.token_index import token_key
from mlx_isolate_shared.wire import CacheFigures

log = logging.getLogger(__name__)


class PromptCache:
    """Finds the longest usable prefix of a prompt, and keeps what a completion leaves behind.

    Args:
        entries_max: entries of the RAM tier at most; 0 keeps nothing in RAM.
        bytes_max: bytes of the RAM tier at most; None for no cap.
    """

    def __init__(self, *, entries_max: int, bytes_max: int | None) -> None:
        self._ram = RamTier(entries_max=entries_max, bytes_max=bytes_max)
        self._hits = 0
        self._hit_tokens = 0
        self._misses: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.put_seconds_last = 0.0
        self.put_seconds_max = 0.0

    def take(self, tokens: Sequence[int], namespace: str) -> tuple[list[Any] | None, int]:
        """The longest usable prefix of a prompt.

        Args:
            tokens: the whole prompt; at least its last token is always left to run.
            namespace: what entries may be shared within (model + adapter + KV scheme + draft).

        Returns:
            The cache (mlx-lm objects, one row, for the caller to write to) and how many tokens it
            stands for, or (None, 0).
        """
        key = token_key(tokens)
        match = self._ram.find(namespace, key, length_max=max(0, len(tokens) - 1))
        if match is None:
            shared = self._ram.longest_shared(namespace, key)
            self._misses["not_cuttable" if shared > 1 else "no_prefix"] += 1
            return None, 0
        self._ram.use(match.value)
        self._hits += 1
        self._hit_tokens += match.length
        return snapshot.hand_out(match.value.cache, match.length), match.length

    def put(
        self, tokens: Sequence[int], cache: Sequence[Any], namespace: str, kind: EntryKind
    ) -> None:
        """Keep a cache under the tokens it stands for.

        Evaluates what it keeps, tensor by tensor, as array objects of its own: the caller may go
        on writing to `cache`. Tokens that the cache has not seen (the last one sampled) may be
        named; they are left off. A cache whose length is uncertain is not kept.

        Args:
            tokens: prompt and generated tokens, in order.
            cache: mlx-lm cache objects of one row (never a batch).
            kind: which part of a conversation ends here.
        """
        start = time.perf_counter()
        length = kinds.usable_length(len(tokens), cache)
        if length is None:
            self._refused["uncertain_length"] += 1
            return
        kept = snapshot.keep(cache, length)
        entry = Entry(
            namespace=namespace,
            key=token_key(tokens[:length]),
            cache=kept,
            bytes=snapshot.bytes_of(kept),
            cuttable=kinds.can_cut(kept),
            storable=kinds.can_store(kept),
            kind=kind,
        )
        self._ram.put(entry)
        self.put_seconds_last = time.perf_counter() - start
        self.put_seconds_max = max(self.put_seconds_max, self.put_seconds_last)

    def wants_checkpoint(self, cache: Sequence[Any]) -> bool:
        """Whether a `put` in the middle of a completion is of use for this kind of cache.

        False while the whole cache can be cut: the entry at the end then serves every shorter
        prefix. True for windows that have wrapped or will, recurrent state and unknown kinds: put
        at the ends of prompt segments and at prompt length - 1.
        """
        return not all(kinds.kind_of(part).cut == "always" for part in kinds.leaves(cache))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how fast prompts run through the model, for the choice between restore and run."""

    def set_idle(self, idle: bool) -> None:
        """Tell whether the generation thread has nothing to do; background work waits for it."""

    def trim_to(self, bytes_max: int) -> None:
        """Give RAM back at once, e.g. to make room for the rows of a batch."""
        self._ram.trim(bytes_max)

    def clear(self) -> None:
        """Forget every entry of the RAM tier."""
        self._ram.clear()

    def figures(self) -> CacheFigures:
        """Both tiers in numbers, since the start."""
        return CacheFigures(
            ram_entries=len(self._ram),
            ram_bytes=self._ram.bytes,
            ram_bytes_max=self._ram.bytes_max or 0,
            hits=self._hits,
            misses=self._misses.total(),
            hit_tokens=self._hit_tokens,
            miss_reasons=dict(self._misses),
        )
