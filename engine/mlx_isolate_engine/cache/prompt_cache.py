"""The prompt cache as the generation lanes see it: `take` before a prefill, `put` after.

`take`, `put` and `note_prefill` run on the generation thread; everything else may be called from
any thread. Nobody outside knows how many tiers there are. A cache that cannot be used is a miss,
never an error.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_isolate_engine.cache import kinds, snapshot
from mlx_isolate_engine.cache.cold_side import ColdSettings, ColdSide
from mlx_isolate_engine.cache.ram_tier import Entry, RamTier
from mlx_isolate_engine.cache.token_index import Match, key_length, token_key
from mlx_isolate_engine.cache.write_behind import FlushEvidence
from mlx_isolate_engine.generation.ports import EntryKind
from mlx_isolate_engine.unused_memory import give_back
from mlx_isolate_shared.errors import CacheError
from mlx_isolate_shared.wire import CacheFigures

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TakeFacts:
    """Where the prefix of the last `take` came from, and why.

    Attributes:
        reason: of the choice between restore and prefill, or of the miss.
        restore_s: seconds spent reading.
    """

    tier: Literal["ram", "ssd", "none"]
    tokens: int
    reason: str = ""
    restore_s: float = 0.0


class PromptCache:
    """Finds the longest usable prefix of a prompt, and keeps what a completion leaves behind.

    Args:
        entries_max: entries of the RAM tier at most; 0 keeps nothing in RAM.
        bytes_max: bytes of the RAM tier at most; None for no cap.
        cold: the tier below RAM; without it nothing of that tier runs.
    """

    def __init__(
        self, *, entries_max: int, bytes_max: int | None, cold: ColdSettings | None = None
    ) -> None:
        self._ram = RamTier(entries_max=entries_max, bytes_max=bytes_max)
        self._lock = threading.Lock()
        self._hits = 0
        self._hit_tokens = 0
        self._misses: Counter[str] = Counter()
        self.last_take = TakeFacts(tier="none", tokens=0)
        self._warned = False
        self._cold = None if cold is None else ColdSide(cold, self._demote)
        if self._cold is not None:
            self._cold.start()

    def take(self, tokens: Sequence[int], namespace: str) -> tuple[list[Any] | None, int]:
        """The longest usable prefix of a prompt.

        Args:
            tokens: the whole prompt; at least its last token is always left to run.
            namespace: what entries may be shared within (model + adapter + KV scheme + draft).

        Returns:
            The cache (mlx-lm objects, one row, for the caller to write to) and how many tokens it
            stands for, or (None, 0). `last_take` says where it came from.
        """
        steps = self.take_stepwise(tokens, namespace)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: tuple[list[Any] | None, int] = end.value
                return found

    def take_stepwise(
        self,
        tokens: Sequence[int],
        namespace: str,
        *,
        length_min: int = 0,
        length_max: int | None = None,
        is_last_try: bool = True,
    ) -> Generator[None, None, tuple[list[Any] | None, int]]:
        """As `take`, yielding after every tensor read from disk, for other rows to go on.

        Args:
            length_min: a shorter prefix is of no use.
            length_max: a longer one is neither; always below the prompt's length.
            is_last_try: nothing found is a miss; else the same prompt is looked for elsewhere.
        """
        key = token_key(tokens)
        longest = max(0, len(tokens) - 1)
        longest = longest if length_max is None else min(longest, length_max)
        with self._lock:
            match = self._ram.find(namespace, key, length_max=longest)
        if match is not None and match.length < length_min:
            match = None
        reason = "longest"
        in_ram = match.length if match else 0
        if self._cold is not None and in_ram < longest:
            restored, reason = yield from self._cold.restore(
                namespace, key, in_ram, (length_min, longest)
            )
            if restored is not None:
                length, spent_s = restored.tokens, restored.seconds
                self._hit(TakeFacts(tier="ssd", tokens=length, reason=reason, restore_s=spent_s))
                return restored.cache, length
        if match is None:
            return self._miss(namespace, key, reason) if is_last_try else (None, 0)
        return self._hand_out(match, reason)

    def expect(self, tokens: Sequence[int], namespace: str) -> Callable[[], int]:
        """Tells at each call how long a prefix a `take` would find in RAM just then; cheap."""
        key = token_key(tokens)

        def length() -> int:
            with self._lock:
                match = self._ram.find(namespace, key, length_max=max(0, len(tokens) - 1))
            return match.length if match is not None else 0

        return length

    def _hand_out(self, match: Match[Entry], reason: str) -> tuple[list[Any], int]:
        entry = match.value
        with self._lock:
            if self._ram.has(entry):
                self._ram.use(entry)
        if self._cold is not None:
            self._cold.tier.touch(entry.namespace, entry.key)
        self._hit(TakeFacts(tier="ram", tokens=match.length, reason=reason))
        return snapshot.hand_out(entry.cache, match.length), match.length

    def _hit(self, facts: TakeFacts) -> None:
        self._hits += 1
        self._hit_tokens += facts.tokens
        self.last_take = facts

    def _miss(self, namespace: str, key: bytes, reason: str) -> tuple[None, int]:
        if reason == "longest":
            with self._lock:
                shared = self._ram.longest_shared(namespace, key)
            reason = "not_cuttable" if shared > 1 else "no_prefix"
        self._misses[reason] += 1
        self.last_take = TakeFacts(tier="none", tokens=0, reason=reason)
        return None, 0

    def put(
        self, tokens: Sequence[int], cache: Sequence[Any], namespace: str, kind: EntryKind
    ) -> None:
        """Keep a cache under the tokens it stands for.

        Evaluates what it keeps, tensor by tensor, as array objects of its own: the caller may go
        on writing to `cache`. Where a cache knows its position, tokens that it has not seen are
        left off and rows that ran ahead are cut; where its parts disagree it is not kept, nor where
        one is of an unknown kind that cannot be copied. A purely recurrent state knows no position:
        there `tokens` must be exactly what it has seen.

        Args:
            tokens: what the model has seen of prompt and generated tokens, in order.
            cache: mlx-lm cache objects of one row (never a batch).
            kind: which part of a conversation ends here.
        """
        length = kinds.usable_length(len(tokens), cache)
        if length is None:
            return
        try:
            kept = snapshot.keep(cache, length)
        except CacheError as error:
            if not self._warned:  # one line, since it is so with every completion
                self._warned = True
                log.warning("cache.not_kept cause=%s", error)
            return
        entry = Entry(
            namespace=namespace,
            key=token_key(tokens[:length]),
            cache=kept,
            bytes=snapshot.bytes_of(kept),
            cuttable=kinds.can_cut(kept),
            storable=kinds.can_store(kept),
            kind=kind,
        )
        with self._lock:
            pushed = self._ram.put(entry)
        if self._cold is not None:
            self._cold.hand_down(entry, pushed.evicted, pushed.absorbed)

    def wants_checkpoint(self, cache: Sequence[Any]) -> bool:
        """Whether a `put` in the middle of a completion is of use for this kind of cache.

        False while the whole cache can be cut: the entry at the end then serves every shorter
        prefix. True for windows that have wrapped or will, recurrent state and unknown kinds: put
        at the ends of prompt segments and at prompt length - 1.
        """
        return not all(kinds.kind_of(part).cut == "always" for part in kinds.leaves(cache))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how fast prompts run through the model, for the choice between restore and run."""
        if self._cold is not None:
            self._cold.choice.note_prefill(tokens, seconds)

    def set_idle(self, idle: bool) -> None:
        """Tell whether the generation thread has nothing to do; background work waits for it."""
        if self._cold is not None:
            self._cold.writer.set_idle(idle)

    def trim_to(self, bytes_max: int) -> None:
        """Give RAM back at once, down to `bytes_max`; what leaves it spills."""
        with self._lock:
            evicted = self._ram.trim(bytes_max)
        if self._cold is not None:
            self._cold.spill(evicted)

    def _demote(self) -> bool:
        """All has been idle for long: what is durable leaves RAM, the rest is written first."""
        changed = self._leave_ram()
        if changed:
            give_back()  # else MLX would keep the buffers for the next request
        return changed

    def _leave_ram(self) -> bool:
        assert self._cold is not None
        changed = False
        with self._lock:
            entries = self._ram.entries()
        for entry in entries:
            if self._cold.is_dirty(entry):
                self._cold.writer.write_now(entry)
            elif entry.storable:
                with self._lock:
                    self._ram.remove(entry)
                changed = True
        return changed

    def clear(self) -> int:
        """Forget every entry of both tiers; returns how many there were."""
        with self._lock:
            count = len(self._ram)
            self._ram.clear()
        if self._cold is not None:
            count += self._cold.clear()
        return count

    def entries(self) -> list[dict[str, object]]:
        """What RAM holds, least recently used first; no tokens, only how many."""
        with self._lock:
            entries = self._ram.entries()
        return [
            {
                "tier": "ram",
                "tokens": key_length(entry.key),
                "bytes": entry.bytes,
                "kind": entry.kind,
                "durable": self._cold is not None and not self._cold.is_dirty(entry),
            }
            for entry in entries
        ]

    @property
    def has_cold_tier(self) -> bool:
        """Whether anything can be made durable."""
        return self._cold is not None

    def flush(self, timeout_s: float) -> FlushEvidence:
        """Wait until what is dirty now is durable; never call it on the generation thread.

        Covers all of RAM: what is written by itself only when it leaves RAM (without
        write-behind), and what was durable once and whose file somebody has removed.
        """
        if self._cold is None:
            return FlushEvidence(durable=False)
        return self._cold.writer.flush(timeout_s, self._write_all)

    def _write_all(self) -> None:
        """Hand what RAM alone holds to the writer."""
        assert self._cold is not None
        with self._lock:
            entries = self._ram.entries()
        for entry in entries:
            if self._cold.is_dirty(entry):
                self._cold.writer.write_now(entry)

    def close(self, timeout_s: float) -> FlushEvidence:
        """Write what RAM holds and is not durable, as far as the time allows, and end.

        Call it once nothing more is admitted: what is just being kept is waited for, up to half
        of the time.
        """
        if self._cold is None:
            return FlushEvidence(durable=False)
        began = time.monotonic()
        self._cold.writer.wait_idle(timeout_s / 2)
        timeout_s -= time.monotonic() - began
        return self._cold.writer.close(timeout_s, self._write_all)

    def figures(self) -> CacheFigures:
        """Both tiers in numbers, since the start."""
        # Within an insertion the newcomer is counted before the oldest has left.
        with self._lock:
            entries, size = len(self._ram), self._ram.bytes
        ram = CacheFigures(
            ram_entries=entries,
            ram_bytes=size,
            ram_bytes_max=self._ram.bytes_max or 0,
            hits=self._hits,
            misses=self._misses.total(),
            hit_tokens=self._hit_tokens,
            miss_reasons=dict(self._misses),
        )
        return ram if self._cold is None else self._cold.add_figures(ram)
